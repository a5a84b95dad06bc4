"""Ask a question about a picture:  python demo.py IMAGE "question" [--model DIR]

Prints the answer alone on standard output. The same as `conceptmoe-vl ask`.
"""

import conceptmoe_vl_runtime

conceptmoe_vl_runtime.setup(quiet=True)

import argparse  # noqa: E402  (nothing may import torch before the line above)
import sys  # noqa: E402

from conceptmoe_vl.cli import ASK, add_ask_arguments, ask, run_program  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="demo.py", description=ASK)
    add_ask_arguments(parser)
    arguments = parser.parse_args(argv)
    return run_program(lambda: ask(arguments))


if __name__ == "__main__":
    sys.exit(main())
