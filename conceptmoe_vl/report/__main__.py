"""Draws the curves of runs: python -m conceptmoe_vl.report RUN... [--out PAGE] [--smoothing S]"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from conceptmoe_vl.errors import UserError

from .page import write_report


def main(arguments: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m conceptmoe_vl.report",
        description="Draw the curves of one or several runs into one self-contained HTML page.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder with a metrics.jsonl")
    parser.add_argument("--out", help="the page; default: report.html in the first run's folder")
    parser.add_argument(
        "--smoothing",
        type=float,
        default=0.9,
        help="weight of what came before in the exponential mean, 0 (none) to below 1",
    )
    parsed = parser.parse_args(arguments)
    try:
        if not 0 <= parsed.smoothing < 1:
            raise UserError(f"--smoothing is {parsed.smoothing}; give 0 to below 1")
        folders = [Path(run) for run in parsed.runs]
        out = Path(parsed.out) if parsed.out else folders[0] / "report.html"
        write_report(folders, out, parsed.smoothing)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
