"""What is proven of a schedule before it runs: order, deadlock, buffers, staleness."""

from nestpipe.checks.buffers import instance_of
from nestpipe.checks.check import check, check_programs, require_safe
from nestpipe.checks.report import Report
from nestpipe.checks.report_text import report_document, report_table, report_text
from nestpipe.checks.window import num_micro_batches_to_check

__all__ = [
    "Report",
    "check",
    "check_programs",
    "instance_of",
    "num_micro_batches_to_check",
    "report_document",
    "report_table",
    "report_text",
    "require_safe",
]
