"""The arguments of `conceptmoe-vl plan`; what it needs is imported when it runs."""

from __future__ import annotations

import argparse
from typing import Any

import conceptmoe_vl_runtime

PLAN = (
    "Search the ConceptMoE configuration with the parameters and FLOPs of a plain MoE, and print "
    "what it saves. Exit status 1 where none is within 0.5 % and 1 %."
)


def add_command(commands: Any) -> None:
    """Adds `plan` to the subparsers of `conceptmoe-vl`."""
    parser = commands.add_parser(
        "plan", help="match a ConceptMoE configuration to a plain MoE", description=PLAN
    )
    parser.add_argument(
        "base",
        metavar="BASE",
        help="the plain MoE: a YAML file with model sections, a config.json, or a folder of a "
        "model or of a checkpoint that convert takes",
    )
    parser.add_argument(
        "--ratio", type=float, default=2.0, metavar="R", help="tokens per concept (default: 2)"
    )
    parser.add_argument(
        "--strategy",
        choices=["experts", "loops", "width", "auto"],
        default="auto",
        help="what the saved compute is spent on (default: %(default)s)",
    )
    parser.add_argument(
        "--for",
        dest="purpose",
        choices=["scratch", "conversion"],
        default="scratch",
        help="conversion keeps the parameters of pretrained layers (default: %(default)s)",
    )
    for name, meaning in (
        (
            "encoder-layers",
            "layers of the encoder, of BASE's layers in all (default: BASE's split)",
        ),
        ("decoder-layers", "layers of the decoder (default: BASE's split)"),
        ("joint-layers", "last decoder layers with joint decoding (default: BASE's, else 4)"),
        ("loops", "extra passes of concept layers, with --strategy loops (default: searched)"),
        ("width", "width of concepts, with --strategy width (default: searched, about sqrt(R))"),
    ):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=meaning)
    parser.add_argument(
        "--batch", type=int, default=1, metavar="N", help="rows in decoding (default: 1)"
    )
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        default="bfloat16",
        help="of weights and cache (default: %(default)s)",
    )
    parser.add_argument("--out", metavar="FILE.yaml", help="write the matched configuration")
    parser.add_argument("--plot", metavar="FILE", help="draw the savings (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan; exit status 1 where no configuration is matched.

    Raises:
        UserError: no such baseline, an option out of range, no matplotlib for --plot.
    """
    conceptmoe_vl_runtime.setup(quiet=True)
    from conceptmoe_vl.plan_report import print_plan

    return print_plan(arguments)
