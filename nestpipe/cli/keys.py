"""`nestpipe trace keys` and `nestpipe trace cluster`: what a key stream costs, and which samples belong together."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from nestpipe.base import TraceError, write_text
from nestpipe.cli._common import provenance
from nestpipe.cli._render import Format, Output, flat, render
from traces.keys import (
    CodedStream,
    KeyFiles,
    KeyStatistics,
    KeyStream,
    MicroBatchDuplication,
    StreamStatistics,
    cluster_stream,
    duplicate_rows,
    duplication_of,
    key_statistics,
    largest_world_size,
    read_key_files,
    split_matrix,
    statistics_at,
    stream_statistics,
)

__all__ = ["cluster", "keys"]

_MATRIX_UP_TO = 16
_COLUMNS_SHOWN = 40
_LARGEST = 10_000_000

Files = Annotated[list[str], typer.Argument(metavar="FILE...", help="Key files, one after the other; plain or gzip.")]
Column = Annotated[list[str] | None, typer.Option(help="Column (or slot) that holds keys; repeatable.")]
OrderBy = Annotated[str | None, typer.Option(metavar="COLUMN", help="Sort samples by this column; file order without.")]
Batch = Annotated[int, typer.Option(help="Samples a rank takes per step.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of whatever is random.")]
Sequence = Annotated[
    int | None,
    typer.Option(min=1, metavar="ITEMS", help="Group rows into user histories of this length: first column the user."),
]


def keys(
    files: Files,
    batch: Batch = 512,
    world_size: Annotated[int, typer.Option(help="Number of ranks; a global batch is batch x world size.")] = 1,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches of a rank's batch.")] = 1,
    column: Column = None,
    order_by: OrderBy = None,
    sequence: Sequence = None,
    resample: Annotated[
        bool, typer.Option("--resample", help="Where the file is too short, draw samples with replacement.")
    ] = False,
    seed: Seed = 0,
    output: Output = Format.TEXT,
) -> None:
    """Unique ratio, overlap, skew and splits of a key stream, by batch, micro-batch, rank and owner."""
    _check_sizes(batch, world_size, micro_batches)
    read = read_key_files(files, columns=column, order_by=order_by, sequence=sequence)
    facts, notes = read.facts, list[str]()
    columns = _per_column(read, batch)
    coded = CodedStream.of(read.stream)
    del read  # what follows needs the codes only, and would double the memory
    duplication = None
    if coded.num_samples >= batch:
        duplication, note = duplication_of(coded, batch, micro_batches, seed)
        notes.extend([] if note is None else [note])
    result: dict[str, Any] = {"provenance": provenance(seed=seed), **facts}
    result.update(_stream_json(stream_statistics(coded, batch)))
    if columns:
        result["per_column"] = columns
    result["world_size"], result["micro_batches"] = world_size, micro_batches
    whole = _stream_json(stream_statistics(coded, batch * world_size))
    names = ("batch", "batches", "unique_ratio", "overlap_unique", "overlap_lookups")
    result["global_batch"] = {name: whole[name] for name in names}
    if duplication is None:
        notes.append(f"{coded.num_samples} samples do not fill one batch of {batch}: no ratio of batches")
    else:
        statistics, note = _world(coded, batch, world_size, resample=resample, seed=seed, duplication=duplication)
        notes.extend([] if note is None else [note])
        result.update(_world_json(statistics))
        if statistics.world_size <= _MATRIX_UP_TO and statistics.origin == "measured":
            result["splits"]["matrix"] = split_matrix(coded, batch, statistics.world_size).tolist()
    result["notes"] = notes
    render(output, document=lambda: result, rows=lambda: flat(result), text=lambda: _keys_text(result), indent=2)


def cluster(
    files: Files,
    batch: Batch = 512,
    micro_batches: Annotated[
        list[int] | None, typer.Option(help="Number of micro-batches; repeatable. 2, 4, 8, 16 and 32 by default.")
    ] = None,
    column: Column = None,
    order_by: OrderBy = None,
    sequence: Sequence = None,
    seed: Seed = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE.csv", help="Write sample, batch and micro-batch; one --micro-batches."
        ),
    ] = None,
    output: Output = Format.TEXT,
) -> None:
    """Put samples that share keys into the same micro-batch, and say how many rows are then sent twice."""
    numbers = sorted(set(micro_batches or [n for n in (2, 4, 8, 16, 32) if n <= batch]))
    for number in numbers:
        _check_sizes(batch, 1, number)
    if out is not None and len(numbers) != 1:
        raise TraceError(f"--out writes one assignment: give one --micro-batches, got {len(numbers)}")
    read = read_key_files(files, columns=column, order_by=order_by, sequence=sequence, only=True)
    stream = read.stream
    statistics = key_statistics(stream, batch=batch, world_size=1)
    result = {
        "provenance": provenance(seed=seed),
        **read.facts,
        "batch": batch,
        "batches": statistics.num_batches,
        "unique_rows": statistics.unique_keys_per_rank,
        "micro_batches": [_cluster_row(stream, batch, number, seed, out) for number in numbers],
    }
    render(output, document=lambda: result, rows=lambda: flat(result), text=lambda: _cluster_text(result), indent=2)


def _check_sizes(batch: int, world_size: int, micro_batches: int) -> None:
    for name, value in (("--batch", batch), ("--world-size", world_size), ("--micro-batches", micro_batches)):
        if value < 1:
            raise TraceError(f"{name} must be at least 1, got {value}")
        if value > _LARGEST:
            raise TraceError(f"{name} must be at most {_LARGEST:,}, got {value:,}")
    if micro_batches > batch:
        raise TraceError(f"--micro-batches must be at most --batch ({batch}), got {micro_batches}")


def _per_column(read: KeyFiles, batch: int) -> dict[str, dict[str, Any]]:
    """Statistics of each column that may hold keys; empty where that is the stream itself."""
    every = read.every
    if len(every.features) == 1 and every.features == read.stream.features:
        return {}
    return {name: _stream_json(stream_statistics(every.select([name]), batch)) for name in every.features}


def _world(
    coded: CodedStream,
    batch: int,
    world_size: int,
    *,
    resample: bool,
    seed: int,
    duplication: MicroBatchDuplication,
) -> tuple[KeyStatistics, str | None]:
    """Statistics at a world size, or at fewer ranks where the file is too short for anything else, and a note."""
    usable = max(1, largest_world_size(coded, batch))
    if world_size > usable and largest_world_size(coded, batch, 4) < 1 and not resample:
        found = key_statistics(coded, batch=batch, world_size=usable, duplication=(duplication,))
        return found, (
            f"{coded.num_samples} samples are fewer than four batches of {batch}: rank and owner are computed for "
            f"world size {usable}; --resample draws with replacement"
        )
    return statistics_at(
        coded, batch=batch, world_size=world_size, drawn=resample, seed=seed, duplication=(duplication,)
    )


def _stream_json(one: StreamStatistics) -> dict[str, Any]:
    top = dict(zip(("top_0.1%", "top_1%", "top_10%"), one.top_shares, strict=True))
    return {
        "samples": one.samples,
        "lookups": one.lookups,
        "unique": one.unique,
        "lookups_per_sample": one.lookups / one.samples,
        "zipf_ls": None if one.zipf_ls is None else [one.zipf_ls, one.zipf_ls_ranks],
        "zipf_mle": one.zipf_mle,
        **top,
        "batch": one.batch,
        "batches": one.batches,
        "unique_ratio": one.unique_ratio,
        "overlap_unique": one.overlap_unique,
        "overlap_lookups": one.overlap_lookups,
    }


def _world_json(one: KeyStatistics) -> dict[str, Any]:
    micro = asdict(one.duplication[0])
    return {
        "micro_batch": micro,
        "rank": {
            "lookups": one.lookups_per_rank,
            "unique_keys": one.unique_keys_per_rank,
            "unique_ratio": one.unique_ratio_per_rank,
            "shared_keys": one.shared_keys_per_rank,
            "overlap_unique": one.overlap_per_rank,
            "origin": "resampled" if one.origin == "resampled" else "measured",
        },
        "owner": {
            "world_size": one.world_size,
            "global_batches": one.num_batches,
            "received_keys": one.unique_keys_per_rank,
            "received_keys_max": one.received_keys_per_owner_max,
            "skew": one.owner_skew,
            "skew_without_dedup": one.lookup_skew,
            "unique_rows": one.rows_per_owner,
            "unique_rows_max": one.rows_per_owner_max,
            "unique_rows_all": one.rows_per_owner * one.world_size,
            "unique_ratio": one.unique_ratio_at_owner,
            "shared_rows": one.shared_rows_per_owner,
            "shared_rows_max": one.shared_rows_per_owner_max,
            "overlap_unique": one.overlap_at_owner,
            "overlap_lookups": one.shared_lookups,
            "origin": one.origin,
        },
        "splits": {
            "mean_keys": one.unique_keys_per_rank / one.world_size,
            "max_over_mean": one.split_skew,
        },
    }


def _cluster_row(stream: KeyStream, batch: int, number: int, seed: int, out: Path | None) -> dict[str, Any]:
    """Rows sent twice, clustered, in stream order and at random; means over batches. Speed goes to stderr."""
    begin = time.perf_counter()
    clustered = cluster_stream(stream, batch, number, seed=seed)
    speed = len(clustered) / (time.perf_counter() - begin)
    typer.echo(f"{number} micro-batches: {speed:,.0f} samples/s on this machine", err=True)
    if out is not None:
        lines = ["sample,batch,micro_batch\n"]
        lines += [f"{sample},{sample // batch},{micro}\n" for sample, micro in enumerate(clustered.tolist())]
        write_text(out, "".join(lines))
    in_order = np.tile(np.arange(batch, dtype=np.int64) * number // batch, len(clustered) // batch)
    shuffled = np.random.default_rng(seed).permuted(in_order.reshape(-1, batch), axis=1).ravel()

    def duplicates(micro_batch: Any) -> float:
        return float(duplicate_rows(stream, batch, micro_batch, number).mean())

    return {
        "num_micro_batches": number,
        "duplicate_rows_clustered": duplicates(clustered),
        "duplicate_rows_in_order": duplicates(in_order),
        "duplicate_rows_random": duplicates(shuffled),
    }


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.4g}" if isinstance(value, float) and abs(value) < 1000 else f"{value:,.0f}"


def _keys_text(result: dict[str, Any]) -> str:
    lines = [*_head(result), ""]
    zipf = result["zipf_ls"]
    lines += [
        f"samples {_number(result['samples'])}, lookups {_number(result['lookups'])}, "
        f"unique keys {_number(result['unique'])}",
        f"skew: Zipf s {_number(result['zipf_mle'])} (maximum likelihood), "
        f"{_number(zipf[0] if zipf else None)} (least squares on the top {zipf[1] if zipf else 0} ranks); "
        f"top 1 % of the keys take {100 * result['top_1%']:.1f} % of the lookups",
        f"batches of {result['batch']}: {result['batches']}, unique ratio {_number(result['unique_ratio'])}, overlap "
        f"with the batch before {_number(result['overlap_unique'])} of the unique keys, "
        f"{_number(result['overlap_lookups'])} of the lookups",
    ]
    columns = result.get("per_column", {})
    for name, one in list(columns.items())[:_COLUMNS_SHOWN]:
        ratios = [one["unique_ratio"], one["overlap_unique"], one["overlap_lookups"]]
        lines.append(
            f"  column {name}: unique {_number(one['unique'])}; " + ", ".join(_number(value) for value in ratios)
        )
    if len(columns) > _COLUMNS_SHOWN:
        lines.append(f"  and {len(columns) - _COLUMNS_SHOWN} more columns; --format json lists them all")
    if "rank" in result:
        lines += ["", *_world_text(result)]
    lines += [f"note: {note}" for note in result["notes"]]
    return "\n".join(lines)


def _world_text(result: dict[str, Any]) -> list[str]:
    rank, owner, micro = result["rank"], result["owner"], result["micro_batch"]
    at, n = f"{owner['world_size']} ranks ({owner['origin']})", _number
    return [
        f"per rank, {result['batch']} samples ({rank['origin']}): {n(rank['lookups'])} lookups, "
        f"{n(rank['unique_keys'])} keys after dedup, {n(rank['shared_keys'])} of them in its batch before",
        f"{micro['num_micro_batches']} micro-batches send {n(micro['in_order'])} times the batch's rows in order, "
        f"{n(micro['random'])} at random, {n(micro['clustered'])} clustered (measured)",
        f"at the owner, {at}: {n(owner['received_keys'])} keys received on average, "
        f"{n(owner['received_keys_max'])} at the busiest (skew {n(owner['skew'])}; "
        f"{n(owner['skew_without_dedup'])} without dedup)",
        f"  {n(owner['unique_rows'])} rows read after the second dedup, {n(owner['unique_rows_max'])} at most; "
        f"{n(owner['shared_rows'])} of them shared with the global batch before",
        f"  splits: mean {n(result['splits']['mean_keys'])} keys from a rank to an owner, "
        f"largest {n(result['splits']['max_over_mean'])} times that",
    ]


def _head(result: dict[str, Any]) -> list[str]:
    facts = result["provenance"]
    columns = result["key_columns"]
    shown = ", ".join(columns[:8]) + (f", ... ({len(columns)} in all)" if len(columns) > 8 else "")
    return [
        f"nestpipe {facts['nestpipe']}: {facts['command']} (seed {facts['seed']})",
        f"{', '.join(result['files'])}: {result['file_format']}, keys from {shown}, {result['order']} order",
    ]


def _cluster_text(result: dict[str, Any]) -> str:
    unique = result["unique_rows"]
    lines = [
        *_head(result),
        "",
        f"{result['batches']} batches of {result['batch']} samples, {_number(unique)} unique rows each (measured)",
        "rows sent twice, mean over batches; in brackets all rows sent over unique rows",
        "",
        f"{'micro-batches':>13}  {'clustered':>18}  {'in order':>18}  {'random':>18}",
    ]
    for row in result["micro_batches"]:
        cells = [row[f"duplicate_rows_{order}"] for order in ("clustered", "in_order", "random")]
        texts = [f"{value:,.1f} ({1 + value / unique:.3f})" for value in cells]
        lines.append(f"{row['num_micro_batches']:>13}  " + "  ".join(f"{text:>18}" for text in texts))
    return "\n".join(lines)
