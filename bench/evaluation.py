"""Evaluation throughput: this project's model of lm-eval against lm-eval's own `hf` model.

    python -m bench.evaluation [--questions N] [--repeats N] [--batch-size N] [--json FILE]

Both run the same weights on the same requests of lm-eval, `hf` with batch 1, in alternation, on
one thread and in CPU seconds: `choices` are log-likelihoods of four answers behind a question,
`letters` of four letters, `texts` of whole texts (perplexity), `answers` are generated greedily up
to a stop string or 32 tokens. Results are compared before times are reported. Needs lm-eval.
"""

from __future__ import annotations

import conceptmoe_vl_runtime

conceptmoe_vl_runtime.setup()

# ruff: noqa: E402  (the lines above must run before torch is imported)
import argparse
import dataclasses
import itertools
import json
import logging
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from rich.console import Console
from rich.table import Table

from bench.timing import Clock, Pairs, alternate
from conceptmoe_vl import ConceptMoEVLConfig, ConceptMoEVLForConditionalGeneration
from conceptmoe_vl.asking import load_pretrained
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.processing import build_processor
from conceptmoe_vl.tokenizing import TURN_END, train_tokenizer
from eval.adaptors.lm_eval import ConceptMoEVLForLMEval

GOAL = 3.0
TASKS = ("choices", "letters", "texts", "answers")
_DOCS = Path(__file__).parent.parent / "docs"
_TEXT = {
    "hidden_size": 256,
    "encoder_layers": 1,
    "concept_layers": 2,
    "decoder_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "max_position_embeddings": 2048,
}


def write_model(folder: Path, texts: list[str], seed: int = 0) -> None:
    """A model of random weights, 15 M parameters at a vocabulary of 8,192, and its tokenizer."""
    torch.manual_seed(seed)
    tokenizer = train_tokenizer(texts, vocab_size=8192)
    config = ConceptMoEVLConfig(
        text={**_TEXT, "vocab_size": len(tokenizer)},
        chunk={"init": "random", "target_ratio": 2},
        vision=None,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.convert_tokens_to_ids(TURN_END),
    )
    ConceptMoEVLForConditionalGeneration(config).save_pretrained(folder)
    build_processor(config, tokenizer).save_pretrained(folder)


@dataclasses.dataclass(frozen=True)
class Requests:
    """Requests of one kind: the method of lm-eval's models that takes them, and their questions."""

    method: str
    instances: list[Instance]
    questions: int

    def run(self, model: Any) -> list[Any]:
        return getattr(model, self.method)(self.instances, disable_tqdm=True)


def make_requests(words: list[str], questions: int, seed: int = 0) -> dict[str, Requests]:
    """Questions of 20 to 150 words; 4 choices of 1 to 6 words; texts of 200 to 600 words."""
    rng = random.Random(seed)

    def text(low: int, high: int) -> str:
        start = rng.randrange(len(words) - high)
        return " ".join(words[start : start + rng.randint(low, high)])

    asked = [f"{text(20, 150)} Answer:" for _ in range(questions)]
    choices = [f" {text(1, 6)}" for _ in range(4 * questions)]
    pairs = [(asked[n // 4], choice) for n, choice in enumerate(choices)]
    letters = [(question, f" {letter}") for question in asked for letter in "ABCD"]
    settings = {"until": ["e"], "max_gen_toks": 32, "do_sample": False}
    arguments: dict[str, tuple[str, list[tuple]]] = {
        "choices": ("loglikelihood", pairs),
        "letters": ("loglikelihood", letters),
        "texts": ("loglikelihood_rolling", [(text(200, 600),) for _ in range(questions)]),
        "answers": ("generate_until", [(question, dict(settings)) for question in asked]),
    }
    return {
        name: Requests(
            method, [Instance(method, {}, own, n) for n, own in enumerate(given)], questions
        )
        for name, (method, given) in arguments.items()
    }


def check_equal(name: str, ours: list[Any], theirs: list[Any]) -> int:
    """How many texts differ (a float32 tie); numbers must agree.

    Raises:
        UserError: log-likelihoods differ by more than rounding.
    """
    if name == "answers":
        return sum(mine != other.strip() for mine, other in zip(ours, theirs, strict=True))
    flat = [
        (mine, other) if name == "texts" else (mine[0], other[0])
        for mine, other in zip(ours, theirs, strict=True)
    ]
    worst = max(abs(mine - other) / max(abs(other), 1.0) for mine, other in flat)
    if worst > 1e-4:
        raise UserError(f"{name}: log-likelihoods differ by {worst:.1e} of their size")
    return 0


def measure(questions: int, repeats: int, batch_size: int) -> dict[str, Any]:
    """Seconds and ratios of each task."""
    torch.set_num_threads(1)
    texts = [path.read_text(encoding="utf-8") for path in sorted(_DOCS.glob("*.md"))]
    words = list(itertools.chain.from_iterable(text.split() for text in texts))
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), texts)
        model, processor = load_pretrained(folder, "cpu")
        theirs = HFLM(pretrained=model, tokenizer=processor.tokenizer, batch_size=1, device="cpu")
        ours = ConceptMoEVLForLMEval(folder, "cpu", batch_size)
        single = ConceptMoEVLForLMEval(folder, "cpu", 1)
    rows = {}
    for name, requests in make_requests(words, questions).items():
        different = check_equal(name, requests.run(ours), requests.run(theirs))
        variants = {
            "batch": lambda requests=requests: requests.run(ours),
            "single": lambda requests=requests: requests.run(single),
        }
        pairs, _ = alternate(
            Clock("cpu", "cpu"), lambda requests=requests: requests.run(theirs), variants, repeats
        )
        rows[name] = {
            "questions": questions,
            "hf_seconds": pairs["batch"].baseline,
            "seconds": pairs["batch"].variant,
            "speedup": pairs["batch"].speedup,
            "speedup_batch_1": pairs["single"].speedup,
            "different_texts": different,
        }
        Console(stderr=True).print(f"{name}: {_shown(pairs['batch'])}")
    return {"batch_size": batch_size, "repeats": repeats, "goal": GOAL, "tasks": rows}


def _shown(pairs: Pairs) -> str:
    return f"{pairs.baseline:.2f} s, {pairs.variant:.2f} s, {pairs.speedup:.2f} times as fast"


def print_report(report: dict[str, Any]) -> None:
    table = Table(
        title=f"lm-eval: its hf model, batch 1, against ours, batch {report['batch_size']}"
    )
    for column in ("task", "hf, CPU s", "ours, CPU s", "times as fast", "ours at batch 1", "goal"):
        table.add_column(column)
    for name, row in report["tasks"].items():
        table.add_row(
            name,
            f"{row['hf_seconds']:.2f}",
            f"{row['seconds']:.2f}",
            f"{row['speedup']:.2f}",
            f"{row['speedup_batch_1']:.2f}",
            f"{GOAL:g}",
        )
    Console().print(table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--json", type=Path, help="file that the figures are written to")
    options = parser.parse_args(argv)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    report = measure(options.questions, options.repeats, options.batch_size)
    print_report(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
