"""The report page."""

from reports.html.page import page

__all__ = [
    "page",
]
