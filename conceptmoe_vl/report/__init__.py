"""One HTML page with the curves of one or several training runs."""

from .page import write_report

__all__ = ["write_report"]
