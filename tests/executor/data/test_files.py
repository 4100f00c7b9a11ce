"""Labels and dense values are the file's where it has them; what it lacks is said to be synthetic."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from executor.data.files import DenseScale, read_labeled_keys
from executor.data.sources import KeyStreamSource
from nestpipe.base.errors import ExecutorError, TraceError

CRITEO = [
    "1\t1\t\t-3\t" + "\t".join(str(i) for i in range(10)) + "\t" + "\t".join("05db9164" for _ in range(26)),
    "0\t\t7\t5\t" + "\t".join(str(i) for i in range(10)) + "\t" + "\t".join("68fd1e64" for _ in range(26)),
]


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_criteo_file_gives_its_labels_counts_and_ids(tmp_path: Path) -> None:
    found = read_labeled_keys(write(tmp_path / "day_0", "\n".join(CRITEO) + "\n"))
    assert found.labels is not None
    assert found.dense is not None
    assert found.labels.tolist() == [1, 0]
    assert found.dense.shape == (2, 13)
    assert found.dense[:, :3].tolist() == np.log1p(np.array([[1, 0, 0], [0, 7, 5]], dtype=np.float32)).tolist()
    assert (found.label, found.dense_columns[0], len(found.keys.features)) == ("label", "I1", 26)
    assert found.synthetic == ()


def test_columns_are_taken_as_they_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "log.csv", "user,item,stars,age,I1\n1,2,4.5,30,9\n3,4,3,-2,\n")
    found = read_labeled_keys(
        path, label="stars>=4", dense=("age", "I1"), sparse=("item", "user"), scale=DenseScale.RAW
    )
    assert found.labels is not None
    assert found.dense is not None
    assert found.labels.tolist() == [1, 0]
    assert found.dense.tolist() == [[30, 9], [-2, 0]]
    assert found.keys.features == ("item", "user")
    assert found.keys.values.tolist() == [2, 1, 4, 3]
    source = KeyStreamSource(stream=found.keys, batch_size=1, dense=found.dense, labels=found.labels)
    second = source.read(0, 1, 2)
    assert (second.dense.tolist(), second.labels.tolist()) == ([[-2, 0]], [0])


def test_a_file_of_keys_alone_is_said_to_have_synthetic_labels(tmp_path: Path) -> None:
    found = read_labeled_keys(write(tmp_path / "keys.csv", "a,b\n1,2\n3,4\n"))
    assert (found.labels, found.dense, found.synthetic) == (None, None, ("labels", "dense"))


def test_slot_files_have_the_label_that_leads_a_line(tmp_path: Path) -> None:
    found = read_labeled_keys(write(tmp_path / "slots", "1:1 7:2 8:3\n0:1 9:2\n"))
    assert found.labels is not None
    assert found.labels.tolist() == [1, 0]
    assert read_labeled_keys(write(tmp_path / "bare", "7:2 8:3\n9:2\n")).labels is None


@pytest.mark.parametrize(
    ("label", "dense", "message"),
    [
        ("stars", (), "column stars, sample 0: a label must be 0 or 1, got 4.5; give --label 'stars>=NUMBER'"),
        ("stars>=x", (), "--label stars>=x: expected a number after >="),
        ("clicks", (), "unknown column 'clicks'"),
        ("stars>=4", ("name",), "column name: expected numbers"),
    ],
)
def test_columns_that_hold_something_else_are_refused(
    tmp_path: Path, label: str, dense: tuple[str, ...], message: str
) -> None:
    path = write(tmp_path / "log.csv", "item,stars,name\n2,4.5,ann\n4,3,bob\n")
    with pytest.raises((ExecutorError, TraceError), match=message.replace("*", r"\*")):
        read_labeled_keys(path, label=label, dense=dense, sparse=("item",))
