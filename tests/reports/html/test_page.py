"""The report page: complete, self-contained, small, and working in a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nestpipe.base.errors import TraceError
from nestpipe.timeline.metrics import measure, steady_window
from nestpipe.timeline.timeline import Timeline
from reports.figures.lanes import lanes
from reports.html.page import page
from reports.html.tables import metrics as metrics_table
from reports.html.tables import resources, stream_use
from reports.html.timeline import choose, timeline_payload
from reports.runs.records import Record, decode, encode, rows_frame
from reports.runs.runs import SavedRun
from sim.engine.costs import Jitter
from tests.reports import chromium as reports_chromium
from tests.reports.examples import record, results, timeline


def _run(name: str, run: Timeline, schedule: str = "nestpipe", path: Path = Path("nowhere"), **more: Any) -> SavedRun:
    result: Record = decode(encode({"format": "nestpipe run v1", **record(run, schedule, **more)}), name)
    return SavedRun(name=name, path=path, record=result, timeline=run)


def _curve() -> list[dict[str, Any]]:
    rows = results().replace({np.nan: None}).to_dict("records")
    return [{str(key): value for key, value in row.items()} for row in rows]


def _many_ranks(num_ranks: int) -> Timeline:
    """A run of many different ranks: those of a small one again and again, each a little later than the one before."""
    small = timeline("nestpipe", ranks=64, steps=20, fold_ranks=False, jitter=Jitter(cv=0.05, seed=1))
    again = num_ranks // 64
    late = np.arange(num_ranks)[:, None] * 1000

    def tile(values: np.ndarray[Any, Any], shift: Any = 0) -> np.ndarray[Any, Any]:
        return np.tile(values, (again, 1)) + shift

    return replace(
        small,
        ranks=np.arange(num_ranks),
        weights=np.ones(num_ranks, dtype=np.int64),
        start_ns=tile(small.start_ns, late),
        end_ns=tile(small.end_ns, late),
        wait_ns=tile(small.wait_ns),
    )


@pytest.fixture(scope="module")
def two() -> list[SavedRun]:
    assumptions = [{"name": "micro_batches", "value": 8, "low": 4, "high": 16, "why": "the ratio is 1/8"}]
    jittered = timeline("nestpipe", ranks=12, fold_ranks=False, jitter=Jitter(cv=0.1, seed=1, stragglers={5: 1.3}))
    return [
        _run("baseline", timeline("sync"), "sync", curve=_curve()),
        _run("nested", jittered, assumptions=assumptions),
    ]


@pytest.fixture(scope="module")
def html(two: list[SavedRun]) -> str:
    return page(two, made="made by a test")


class _Outline(HTMLParser):
    """Ids, tables as lists of rows, and addresses that a page would fetch."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.fetched: list[str] = []
        self.open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        if known.get("id"):
            self.ids.append(str(known["id"]))
        address = known.get("src") or (known.get("href") if tag in ("link", "script", "image", "use") else None)
        if address and not address.startswith(("data:", "#")):
            self.fetched.append(address)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self.tables and self.tables[-1] and self.tables[-1][-1] and {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data.strip()


def _payload(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_page_has_every_section_and_fetches_nothing(html: str) -> None:
    outline = _Outline(html)
    wanted = {"summary", "curve", "partition", "timelines", "limits", "resources", "comparison", "provenance"}
    assert wanted <= set(outline.ids)
    assert len(outline.ids) == len(set(outline.ids))
    assert outline.fetched == []
    assert set(re.findall(r"https?://[^\s\"'<)]+", html)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


def test_tables_hold_plain_numbers_of_the_run(html: str, two: list[SavedRun]) -> None:
    tables = {table[0][0]: table for table in _Outline(html).tables}
    step = tables["part"][-1]
    assert step[0] == "step"
    assert [float(step[1]), float(step[3])] == pytest.approx(
        [measure(run.timeline).step_latency_ms for run in two], abs=5e-4
    )
    shares = [float(row[2]) for row in tables["part"][1:-1]]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    assert tables["metric"][0][:3] == ["metric", "unit", "baseline"]
    assert ["micro_batches", "8", "4 to 16", "", "the ratio is 1/8", "nested"] in tables["assumption"]


def test_every_number_of_a_run_has_its_status(two: list[SavedRun]) -> None:
    table = metrics_table(two[:1])
    assert table.heads == ("metric", "unit", "value", "status", "published", "error (%)")
    assert {row[3] for row in table.rows} == {"predicted"}
    assert resources(two[0], steady_window(two[0].timeline)).heads[-1] == "status"


def test_a_page_of_one_run_without_extras_leaves_the_empty_sections_out() -> None:
    html = page([_run("alone", timeline("dbp"), "dbp", limit=None)])
    ids = set(_Outline(html).ids)
    assert not {"curve", "limits", "comparison"} & ids
    assert {"summary", "partition", "timelines", "resources", "provenance"} <= ids


def test_links_and_hosts_of_a_run_are_drawn_as_a_heat_map_and_many_fold_away() -> None:
    def uses(count: int) -> list[dict[str, Any]]:
        return [{"resource": f"dram {n}", "busy": n / count, "status": "assumed"} for n in range(count)]

    few, many = (_run(f"{n} hosts", timeline("sync"), "sync", resources=uses(n)) for n in (3, 300))
    other = _run("other", timeline("sync"), "sync", resources=[{"resource": "link", "busy": 0.5, "status": "assumed"}])
    html = page([few, many, other])
    assert [label in html for label in ("Load of 3 hosts", "Load of 300 hosts", "Load of other")] == [True, True, False]
    assert "Resources of 300 hosts: " in html
    assert "Resources of 3 hosts: " not in html
    ids = _Outline(html).ids
    assert len(ids) == len(set(ids))
    assert _Outline(html).fetched == []
    assert len(page([many])) < len(page([few])) + 100_000


def test_names_from_outside_cannot_become_markup() -> None:
    name = "</script><script>alert(1)</script><b>&"
    html = page([_run(name, timeline("sync"), "sync", provenance={"command": "<img src=x onerror=alert(1)>"})])
    assert "<script>alert" not in html
    assert "<img" not in html
    assert _payload(html)["runs"][0]["name"] == name


def test_runs_of_one_name_are_told_apart(two: list[SavedRun]) -> None:
    html = page([two[0], replace(two[1], name="baseline")])
    assert [run["name"] for run in _payload(html)["runs"]] == ["baseline", "baseline (2)"]


def test_stream_use_agrees_with_the_partition_where_nothing_overlaps() -> None:
    run = timeline("sync")
    use = stream_use(run, steady_window(run)).set_index("stream")
    parts = measure(run).parts_ms
    assert use["busy"].sum() == pytest.approx(1.0)
    assert use.at["comm", "busy"] * 585 == pytest.approx(
        parts["exposed all_to_all[rows]"] + parts["exposed all_to_all[grads]"]
    )
    assert (use["waiting"] == 0).all()


def test_the_payload_places_every_op_where_the_timeline_has_it(two: list[SavedRun]) -> None:
    run = two[1].timeline
    window = steady_window(run)
    payload = timeline_payload(run, window, choose(run, window, ranks=[5]), "x")
    rank = payload["ranks"][0]
    assert (rank["rank"], len(payload["ranks"])) == (5, 1)
    frame = run.frame([5]).sort_values(["stream", "start_ns"])
    start = sorted(payload["origin"] + t for t in rank["t"])
    assert start == sorted(frame["start_ns"])
    assert sum(rank["d"]) == int((frame["end_ns"] - frame["start_ns"]).sum())
    assert sum(rank["w"]) == int(frame["wait_ns"].sum())
    shown = lanes(run, rank=5)
    assert [payload["origin"] + at for at in payload["view"]] == [shown.start_ns, shown.end_ns]


def test_of_many_ranks_a_few_are_chosen_and_named() -> None:
    run = timeline("nestpipe", ranks=40, fold_ranks=False, jitter=Jitter(cv=0.02, seed=1, stragglers={17: 1.4}))
    choice = choose(run, steady_window(run), num_ranks=5)
    assert len(choice.ranks) == 5
    assert choice.ranks[0] == 17
    assert f"ranks {', '.join(map(str, choice.ranks))} of 40" in choice.words
    assert "from the one that its peers wait for" in choice.words
    folded = timeline("nestpipe", ranks=40)
    assert (
        choose(folded, steady_window(folded)).words == "Shown: rank 0, which stands for all 40 ranks, as they are alike"
    )


def test_steady_steps_are_kept_when_there_are_too_many_spans() -> None:
    run = timeline("nestpipe", steps=60)
    window = steady_window(run)
    choice = choose(run, window, num_spans=480)
    assert window.first < choice.first_step < choice.last_step <= window.last
    assert "iterations " in choice.words
    payload = timeline_payload(run, window, choice, "x")
    assert 0 < len(payload["k"]) <= 480


def test_a_page_of_1536_ranks_stays_small() -> None:
    html = page([_run("large", _many_ranks(1536), curve=_curve())])
    assert len(html.encode()) < 5_000_000
    payload = _payload(html)["runs"][0]
    assert len(payload["ranks"]) == 8
    assert "of 1,536" in html


def test_ranks_that_a_run_does_not_hold_are_refused(two: list[SavedRun]) -> None:
    with pytest.raises(TraceError, match="nowhere: rank 99 is not in the run; it holds 0"):
        page(two, ranks=[99])
    with pytest.raises(TraceError, match="at least one run"):
        page([])


def test_only_exports_that_exist_are_linked(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "trace.json").write_text("{}")
    run = _run("a", timeline("sync"), "sync", folder, exports={"perfetto": "trace.json", "kineto": "gone.json"})
    html = page([run], base=tmp_path)
    assert 'href="runs/a/trace.json">perfetto trace</a>' in html
    assert "gone.json" not in html


def test_rows_become_the_long_table_of_the_plots(two: list[SavedRun]) -> None:
    frame = rows_frame(two[0].record.curve)
    assert len(frame) == len(results())
    assert frame["published"].notna().sum() == results()["published"].notna().sum()


# -- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(html: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[reports_chromium.Page]:
    program = reports_chromium.find()
    if program is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(html, encoding="utf-8")
    with reports_chromium.Page(program) as opened:
        opened.open(path)
        yield opened


@pytest.fixture
def opened(browser: reports_chromium.Page) -> reports_chromium.Page:
    """The page with its timelines as they are at first, in view."""
    browser.value(
        "document.querySelector('[data-zoom=steps]').click(); document.querySelector('#timelines').scrollIntoView()"
    )
    return browser


def _state(opened: reports_chromium.Page, panel: int = 1) -> dict[str, Any]:
    """What a canvas says it shows, and where it is."""
    return opened.value(
        f"(() => {{ const c = document.querySelectorAll('canvas')[{panel}], b = c.getBoundingClientRect();"
        "return {view: c.dataset.view.split(' ').map(Number), drawn: +c.dataset.drawn, rank: c.dataset.rank,"
        "x: b.x, y: b.y, width: b.width, height: b.height}; })()"
    )


def test_the_page_runs_without_errors_and_without_a_network(browser: reports_chromium.Page) -> None:
    methods = [event.get("method") for event in browser.events]
    assert "Runtime.exceptionThrown" not in methods
    requests = [e["params"]["request"]["url"] for e in browser.events if e.get("method") == "Network.requestWillBeSent"]
    assert [url.split(":")[0] for url in requests if not url.startswith("data:")] == ["file"]


def test_timelines_are_drawn_in_colour(opened: reports_chromium.Page) -> None:
    assert _state(opened)["drawn"] > 50
    colours = opened.value(
        "(() => { const c = document.querySelectorAll('canvas')[1];"
        "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data, seen = {};"
        "for (let i = 0; i < d.length; i += 4) { const k = d[i] + ',' + d[i + 1] + ',' + d[i + 2];"
        "seen[k] = (seen[k] || 0) + 1; } return seen; })()"
    )
    for colour in ("0,114,178", "124,196,238", "242,177,52", "213,94,0", "0,158,115"):
        assert colours.get(colour, 0) > 100, colour


def test_pointing_at_an_op_tells_when_it_ran(opened: reports_chromium.Page, two: list[SavedRun]) -> None:
    view = lanes(two[1].timeline, rank=5, steps=2)
    state = _state(opened)
    opened.value("document.querySelectorAll('.rank')[1].value = '0'")
    backward = view.spans[(view.spans["kind"] == "backward")].iloc[3]
    scale = (state["width"] - 92 - 4) / (state["view"][1] - state["view"][0])
    middle = (backward["start_ns"] + backward["end_ns"]) / 2 - view.start_ns
    rows = opened.value("document.querySelectorAll('.lanes')[1].querySelectorAll('.streams input').length")
    opened.mouse("mouseMoved", state["x"] + 92 + middle * scale, state["y"] + 4 + (rows - 0.5) * 24)
    words = opened.value("document.getElementById('tip').textContent")
    assert f"backward, batch {backward['batch']}, micro-batch {backward['micro_batch']}" in words
    took = (backward["end_ns"] - backward["start_ns"]) / 1e6
    assert f"starts at {(backward['start_ns'] - view.start_ns) / 1e6:.3f} ms on this axis, takes {took:.3f} ms" in words


def test_buttons_keys_and_dragging_move_all_runs_together(opened: reports_chromium.Page) -> None:
    start = _state(opened, 0)["view"]
    width = start[1] - start[0]
    opened.value("document.querySelector('[data-zoom=in]').click()")
    assert [np.ptp(_state(opened, i)["view"]) for i in range(2)] == pytest.approx([width / 2] * 2, rel=1e-6)
    state = _state(opened)
    middle = (state["x"] + state["width"] / 2, state["y"] + state["height"] / 2)
    opened.mouse("mousePressed", *middle, button="left", clickCount=1)
    opened.mouse("mouseMoved", middle[0] - 200, middle[1], button="left")
    opened.mouse("mouseReleased", middle[0] - 200, middle[1], button="left", clickCount=1)
    moved = _state(opened)["view"][0] - state["view"][0]
    assert moved == pytest.approx(200 / (state["width"] - 96) * width / 2, rel=1e-3)
    opened.value("document.querySelector('#link').click()")
    before = [_state(opened, i)["view"] for i in range(2)]
    opened.value("document.querySelectorAll('canvas')[1].focus()")
    opened.send("Input.dispatchKeyEvent", type="keyDown", key="+", text="+")
    after = [_state(opened, i)["view"] for i in range(2)]
    assert after[0] == before[0]
    assert np.ptp(after[1]) == pytest.approx(np.ptp(before[1]) / 2, rel=1e-6)
    opened.value("document.querySelector('#link').click()")


def test_ctrl_and_wheel_zoom_around_the_pointer_and_the_wheel_alone_does_not(opened: reports_chromium.Page) -> None:
    state = _state(opened)
    at = (state["x"] + 92 + (state["width"] - 96) / 4, state["y"] + 30)
    opened.mouse("mouseWheel", *at, deltaX=0, deltaY=-400, modifiers=2)
    view = _state(opened)["view"]
    assert np.ptp(view) < 0.8 * np.ptp(state["view"])
    fixed = [each[0] + np.ptp(each) / 4 for each in (state["view"], view)]
    assert fixed[1] == pytest.approx(fixed[0], abs=0.01 * np.ptp(view))
    opened.mouse("mouseWheel", *at, deltaX=0, deltaY=-400)
    assert _state(opened)["view"] == view


def test_streams_and_ranks_can_be_filtered(opened: reports_chromium.Page) -> None:
    before = _state(opened)
    toggle = "document.querySelectorAll('.lanes')[1].querySelector('input[name=compute]').click()"
    opened.value(toggle)
    hidden = _state(opened)
    assert hidden["drawn"] < before["drawn"]
    assert hidden["height"] == before["height"] - 24
    opened.value(toggle)
    assert _state(opened)["drawn"] == before["drawn"]
    options = opened.value("[...document.querySelectorAll('.rank')[1].options].map((o) => o.textContent)")
    assert options[0] == "5"  # the slow one, for which the others wait, comes first
    assert len(options) == 8
    opened.value(
        "(() => { const s = document.querySelectorAll('.rank')[1]; s.value = '3';"
        "s.dispatchEvent(new Event('change')); })()"
    )
    assert _state(opened)["rank"] == options[3]
    opened.value(
        "(() => { const s = document.querySelectorAll('.rank')[1]; s.value = '0';"
        "s.dispatchEvent(new Event('change')); })()"
    )


def test_a_table_is_copied_as_tab_separated_numbers(opened: reports_chromium.Page, html: str) -> None:
    opened.value("navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }")
    opened.value("document.querySelector('#partition .copy').click()")
    rows = [line.split("\t") for line in opened.value("window.copied").split("\n")]
    expected = next(table for table in _Outline(html).tables if table[0][0] == "part")
    assert rows == expected


def test_light_and_dark_both_have_contrast(opened: reports_chromium.Page) -> None:
    colours = "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    for scheme in ("light", "dark"):
        opened.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        text, back = ([int(n) for n in re.findall(r"\d+", each)[:3]] for each in opened.value(colours))
        assert (sum(text) < sum(back)) == (scheme == "light")
        assert abs(sum(text) - sum(back)) > 500
    opened.value("document.getElementById('theme').click()")
    assert opened.value("document.documentElement.className") == "light"
    opened.value("document.getElementById('theme').click()")
    assert opened.value("document.documentElement.className") == "dark"
    opened.value("document.documentElement.className = ''")
    opened.send("Emulation.setEmulatedMedia", features=[])


def test_the_page_prints(opened: reports_chromium.Page) -> None:
    import base64

    printed = base64.b64decode(opened.send("Page.printToPDF", printBackground=False)["data"])
    assert printed.startswith(b"%PDF")
    assert len(printed) > 50_000
    assert opened.value("document.querySelector('#limits details').open")
