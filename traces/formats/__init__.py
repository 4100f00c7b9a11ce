"""Traces and logs of other tools: one reader per format, and the exports."""

from traces.formats.collective_logs import read_collective_log
from traces.formats.export_chakra import write_chakra
from traces.formats.export_kineto import write_kineto
from traces.formats.export_perfetto import write_perfetto
from traces.formats.importing import import_to, import_traces
from traces.formats.json_stream import EventStream
from traces.formats.reading import load_json, parse_json, read_text

__all__ = [
    "EventStream",
    "import_to",
    "import_traces",
    "load_json",
    "parse_json",
    "read_collective_log",
    "read_text",
    "write_chakra",
    "write_kineto",
    "write_perfetto",
]
