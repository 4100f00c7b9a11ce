"""Saved runs: their files, tables and differences."""

from reports.runs.diff import Diff, as_csv, as_json, as_text, compare, summary
from reports.runs.records import ResultRow, read_rows, rows_frame
from reports.runs.runs import SavedRun, read_run, read_side, write_run
from reports.runs.tables import Column, cell, csv, need_columns, parts, results, table, text

__all__ = [
    "Column",
    "Diff",
    "ResultRow",
    "SavedRun",
    "as_csv",
    "as_json",
    "as_text",
    "cell",
    "compare",
    "csv",
    "need_columns",
    "parts",
    "read_rows",
    "read_run",
    "read_side",
    "results",
    "rows_frame",
    "summary",
    "table",
    "text",
    "write_run",
]
