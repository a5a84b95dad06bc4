"""`python -m data_pipelines build|index|validate|inspect|stats|show`."""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from conceptmoe_vl.errors import UserError
from data_pipelines.build_command import add_build, check_source, positive
from data_pipelines.layouts import LAYOUTS
from data_pipelines.visible import visible

_LEARNT = 4096  # characters of a text that the small tokenizer is learnt from


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0; 1 where the data is damaged; 2 for a mistake in the call."""
    arguments = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):  # names of files and samples may have no form there
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        check_source(arguments)
        options = _parser().parse_args(arguments)
        return options.run(options)
    except UserError as error:
        print(f"error: {visible(str(error))}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()  # a reader such as `head` has seen enough
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m data_pipelines", description="Shards of samples"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    add_build(commands)

    index = commands.add_parser("index", help="write an index beside shards that others built")
    index.add_argument("shards", nargs="+", help="tar files, folders or patterns")
    index.add_argument(
        "--manifest", action="store_true", help="and a manifest.json with counts and checksums"
    )
    index.set_defaults(run=_index)

    validate = commands.add_parser("validate", help="name every fault (exit status 1)")
    validate.add_argument("paths", nargs="+", help="shards, folders, patterns, or JSONL files")
    validate.add_argument(
        "--layout", choices=sorted(LAYOUTS), default="messages", help="of other files than shards"
    )
    validate.add_argument("--images", type=Path, help="folder of the records' images")
    validate.add_argument("--model", help="folder of a model: count tokens, images included")
    validate.add_argument("--tokenizer", help="folder of a tokenizer: count the texts' tokens")
    validate.add_argument(
        "--max-tokens", type=positive, default=4096, metavar="N", help="data.tokens_per_batch"
    )
    validate.add_argument("--json", action="store_true", help="one JSON object")
    validate.set_defaults(run=_validate)

    inspect = commands.add_parser("inspect", help="a table of the first samples")
    inspect.add_argument("shards", nargs="+", help="tar files, folders or patterns")
    inspect.add_argument("--limit", type=positive, default=20, metavar="N", help="samples (20)")
    inspect.add_argument("--html", type=Path, metavar="FILE", help="write a page of them")
    inspect.add_argument("--model", help="with --html: folder of a model, for its processor")
    inspect.set_defaults(run=_inspect)

    stats = commands.add_parser("stats", help="counts over all samples; decodes every image")
    stats.add_argument("shards", nargs="+", help="tar files, folders or patterns")
    stats.add_argument("--png", type=Path, metavar="FILE", help="draw the distributions")
    stats.add_argument("--model", help="folder of a model: count tokens, images included")
    stats.set_defaults(run=_stats)

    show = commands.add_parser("show", help="samples' tokens and which are supervised")
    show.add_argument("shards", nargs="+", help="tar files, folders or patterns")
    show.add_argument("--key", help="one sample's key (the first samples)")
    show.add_argument("--limit", type=positive, default=1, metavar="N", help="samples (1)")
    show.add_argument("--model", help="folder of a model, for its processor (a small tokenizer)")
    show.set_defaults(run=_show)
    return parser


def _index(options: Any) -> int:
    from data_pipelines.indexing import write_indexes

    damaged: list[str] = []

    def on_damage(shard: str, fault: str) -> None:
        damaged.append(shard)
        print(visible(f"shard '{shard}': {fault}; copy it again"), file=sys.stderr)

    entries = write_indexes(options.shards, on_damage, options.manifest)
    samples = sum(entry["samples"] for entry in entries)
    print(f"indexed {samples:,} samples in {len(entries)} shards, damaged {len(damaged)}")
    return int(bool(damaged))


def _validate(options: Any) -> int:
    from data_pipelines.validating import Fault, validate

    faults: list[dict[str, Any]] = []

    def on_fault(fault: Fault) -> None:
        if options.json:
            faults.append(fault._asdict())
        else:
            print(visible(fault.line()))

    counts = validate(
        options.paths,
        on_fault,
        layout=options.layout,
        images=options.images,
        count_tokens=_token_counter(options),
        max_tokens=options.max_tokens,
    )
    found = counts.as_mapping()
    if options.json:
        print(json.dumps({**found, "faults": faults}, indent=2))
    else:
        print(", ".join(f"{name.replace('_', '-')} {value:,}" for name, value in found.items()))
    return int(bool(counts.faults))


def _token_counter(options: Any) -> Any:
    """What `validate` counts tokens with; None: it counts none."""
    if options.model is not None and options.tokenizer is not None:
        raise UserError("--model and --tokenizer are both given; a model has its own tokenizer")
    if options.model is not None:
        processor = _processor(options)
        return lambda turns: len(processor.encode_turns(turns).input_ids)
    if options.tokenizer is None:
        return None
    from conceptmoe_vl.image_processing import ConceptMoEVLImageProcessor
    from conceptmoe_vl.processing import ConceptMoEVLProcessor, add_special_tokens
    from data_pipelines.encoding import without_pictures

    tokenizer = _tokenizer(options.tokenizer)
    add_special_tokens(tokenizer)
    processor = ConceptMoEVLProcessor(ConceptMoEVLImageProcessor(), tokenizer)
    return lambda turns: len(processor.encode_turns(without_pictures(turns)).input_ids)


def _tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    if not Path(folder).is_dir():
        raise UserError(f"--tokenizer: there is no folder '{folder}'")
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"--tokenizer: '{folder}' holds no tokenizer ({reason})") from error


def _inspect(options: Any) -> int:
    from data_pipelines.reports import inspect

    if options.html is None:
        if options.model is not None:
            raise UserError("--model has a meaning with --html alone; add --html FILE")
        return int(inspect(options.shards, options.limit, Console()) > 0)
    from data_pipelines.pages import write_page

    tokenizer = options.model or "tokenizer trained on these shards (--model names a model's)"
    processor = _processor(options)
    faults = write_page(options.shards, options.limit, processor, options.html, tokenizer)
    print(options.html)
    return int(faults > 0)


def _stats(options: Any) -> int:
    from data_pipelines.reports import stats

    count_tokens = None
    if options.model is not None:
        processor = _processor(options)

        def count_tokens(turns: Any) -> int:
            return len(processor.encode_turns(turns).input_ids)

    return int(stats(options.shards, Console(), count_tokens, options.png) > 0)


def _show(options: Any) -> int:
    from data_pipelines.reports import show

    console = Console(soft_wrap=True, highlight=False)
    show(options.shards, options.key, options.limit, _processor(options), console)
    if options.model is None:
        print("tokenizer: trained on these shards (--model names a model's)", file=sys.stderr)
    return 0


def _processor(options: Any) -> Any:
    from conceptmoe_vl.image_processing import ConceptMoEVLImageProcessor
    from conceptmoe_vl.processing import ConceptMoEVLProcessor, train_tokenizer
    from data_pipelines.shards import iter_texts

    if options.model is None:
        # Learning takes the square of a word's length: texts without spaces would take hours.
        texts = (text[:_LEARNT] for text in iter_texts(options.shards, max_samples=1000))
        tokenizer = train_tokenizer(texts, 1024)
        return ConceptMoEVLProcessor(ConceptMoEVLImageProcessor(), tokenizer)
    if not Path(options.model).is_dir():
        raise UserError(f"--model: there is no folder '{options.model}'")
    try:
        return ConceptMoEVLProcessor.from_pretrained(options.model, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"--model: '{options.model}' holds no processor ({reason})") from error


if __name__ == "__main__":
    sys.exit(main())
