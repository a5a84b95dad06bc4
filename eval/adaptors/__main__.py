"""`python -m eval.adaptors lm_eval|lmms_eval …`: the harness's own command line, with this model.

lm-eval finds no models of other packages, and its `hf` model must know this package's classes:
both are imported here first. lmms-eval finds an installed package by itself.
"""

from __future__ import annotations

import importlib
import sys

from eval.adaptors import lmms_eval_manifest

HARNESSES = {"lm_eval": "lm-eval", "lmms_eval": "lmms-eval"}
_USAGE = "usage: python -m eval.adaptors lm_eval|lmms_eval … (what the harness's own program takes)"


def register(name: str) -> None:
    """Makes the model known to a harness, also where this package is not installed."""
    if name == "lm_eval":
        importlib.import_module("eval.adaptors.lm_eval")
        return
    from lmms_eval.models import MODEL_REGISTRY_V2

    MODEL_REGISTRY_V2.register_manifest(lmms_eval_manifest(), overwrite=True)


def main(argv: list[str] | None = None) -> int:
    """Runs a harness; returns its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE)
        return 0
    name, *rest = argv
    if name not in HARNESSES:
        print(f"error: unknown harness '{name}'; {_USAGE}", file=sys.stderr)
        return 2
    import conceptmoe_vl  # noqa: F401  (registers the Auto classes, for the harness's own models)
    from conceptmoe_vl.errors import UserError

    try:
        register(name)
        program = importlib.import_module(f"{name}.__main__")
    except ModuleNotFoundError as error:
        remedy = f"pip install 'conceptmoe-vl[{HARNESSES[name]}]'"
        print(f"error: '{error.name}' is not installed; {remedy}", file=sys.stderr)
        return 2
    sys.argv = [name, *rest]
    try:
        program.cli_evaluate()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
