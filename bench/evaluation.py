"""Evaluation throughput: this project's model of lm-eval against lm-eval's own `hf` model.

    python -m bench.evaluation [--questions N] [--repeats N] [--batch-size N] [--json FILE]

Both run the same weights on the same requests of lm-eval, `hf` with batch 1, in alternation, on
one thread and in CPU seconds: `choices` are log-likelihoods of four answers behind a question,
`letters` of four letters, `texts` of whole texts (perplexity), `answers` are generated greedily up
to an empty line or 32 tokens. `…_5_shots` stand behind five examples that all questions share, as
those of a subject of MMLU do, `letters_own_shots` behind five of their own. Results are compared
before times are reported. What requests share is forgotten from one run to the next. A second
baseline is transformers' Qwen3-MoE of the same layers, width and experts, in lm-eval's `hf` model
too. Needs lm-eval.
"""

from __future__ import annotations

import conceptmoe_vl_runtime

conceptmoe_vl_runtime.setup()

# ruff: noqa: E402  (the lines above must run before torch is imported)
import argparse
import dataclasses
import functools
import itertools
import json
import logging
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from rich.console import Console
from rich.table import Table

from bench.timing import Clock, Pairs, alternate
from conceptmoe_vl import ConceptMoEVLConfig, ConceptMoEVLForConditionalGeneration
from conceptmoe_vl.asking import load_pretrained
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.prefixes import PrefixCache
from conceptmoe_vl.processing import build_processor
from conceptmoe_vl.tokenizing import TURN_END, train_tokenizer
from eval.adaptors.lm_eval import ConceptMoEVLForLMEval
from eval.arguments import add_prefix_cache

GOAL = 3.0
# Of MMLU, whose questions and examples have about this many words.
_INSTRUCTION = "The following are multiple choice questions (with answers) about documentation."
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


class _Texts:
    """Random stretches of a text, and questions with four answers made of them."""

    def __init__(self, words: list[str], seed: int) -> None:
        self.rng, self._words = random.Random(seed), words

    def some(self, low: int, high: int) -> str:
        start = self.rng.randrange(len(self._words) - high)
        return " ".join(self._words[start : start + self.rng.randint(low, high)])

    def question(self) -> str:
        options = "".join(f"\n{letter}. {self.some(1, 8)}" for letter in "ABCD")
        return f"{self.some(15, 60)}{options}\nAnswer:"

    def examples(self) -> str:
        """An instruction and five questions with their answers."""
        shots = [f"{self.question()} {self.rng.choice('ABCD')}\n\n" for _ in range(5)]
        return f"{_INSTRUCTION}\n\n{''.join(shots)}"


def make_requests(words: list[str], questions: int, seed: int = 0) -> dict[str, Requests]:
    """Questions of 20 to 150 words; 4 choices of 1 to 6 words; texts of 200 to 600 words."""
    texts = _Texts(words, seed)
    asked = [f"{texts.some(20, 150)} Answer:" for _ in range(questions)]
    pairs = [(question, f" {texts.some(1, 6)}") for question in asked for _ in range(4)]
    shared = texts.examples()
    behind = [shared + texts.question() for _ in range(questions)]
    own = [texts.examples() + texts.question() for _ in range(questions)]

    def letters(prompts: list[str]) -> list[tuple]:
        return [(prompt, f" {letter}") for prompt in prompts for letter in "ABCD"]

    def answers(prompts: list[str]) -> list[tuple]:
        settings = {"until": ["\n\n"], "max_gen_toks": 32, "do_sample": False}
        return [(prompt, dict(settings)) for prompt in prompts]

    wholes = [(texts.some(200, 600),) for _ in range(questions)]
    arguments: dict[str, tuple[str, list[tuple]]] = {
        "choices": ("loglikelihood", pairs),
        "letters": ("loglikelihood", letters(asked)),
        "texts": ("loglikelihood_rolling", wholes),
        "answers": ("generate_until", answers(asked)),
        "letters_5_shots": ("loglikelihood", letters(behind)),
        "answers_5_shots": ("generate_until", answers(behind)),
        "letters_own_shots": ("loglikelihood", letters(own)),
    }
    return {
        name: Requests(
            method, [Instance(method, {}, own, n) for n, own in enumerate(given)], questions
        )
        for name, (method, given) in arguments.items()
    }


def make_qwen(vocabulary: int) -> Any:
    """transformers' Qwen3-MoE of the same layers, width and experts, random weights."""
    layers = sum(_TEXT[f"{stage}_layers"] for stage in ("encoder", "concept", "decoder"))
    shared = (
        *("hidden_size", "num_attention_heads", "num_key_value_heads", "num_experts"),
        *("num_experts_per_tok", "moe_intermediate_size", "max_position_embeddings"),
    )
    config = transformers.Qwen3MoeConfig(
        vocab_size=vocabulary,
        num_hidden_layers=layers,
        head_dim=_TEXT["hidden_size"] // _TEXT["num_attention_heads"],
        **{name: _TEXT[name] for name in shared},
    )
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(config).eval()


def check_equal(requests: Requests, ours: list[Any], theirs: list[Any]) -> int:
    """How many texts differ (a float32 tie); numbers must agree.

    Raises:
        UserError: log-likelihoods differ by more than rounding.
    """
    if requests.method == "generate_until":
        return sum(mine != other.strip() for mine, other in zip(ours, theirs, strict=True))
    flat = [
        (mine, other) if requests.method == "loglikelihood_rolling" else (mine[0], other[0])
        for mine, other in zip(ours, theirs, strict=True)
    ]
    worst = max(abs(mine - other) / max(abs(other), 1.0) for mine, other in flat)
    if worst > 1e-4:
        raise UserError(f"log-likelihoods differ by {worst:.1e} of their size")
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and ratios of each task; `options` of the command line."""
    questions, repeats, batch_size = options.questions, options.repeats, options.batch_size
    torch.set_num_threads(1)
    # Special tokens in a text count: pages name those of pictures without showing any.
    pages = (path.read_text(encoding="utf-8") for path in sorted(_DOCS.glob("*.md")))
    texts = [page.replace("<|", "<") for page in pages]
    words = list(itertools.chain.from_iterable(text.split() for text in texts))
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), texts)
        model, processor = load_pretrained(folder, "cpu")
        ours = ConceptMoEVLForLMEval(folder, "cpu", batch_size)
        single = ConceptMoEVLForLMEval(folder, "cpu", 1)
    alike = {"tokenizer": processor.tokenizer, "batch_size": 1, "device": "cpu"}
    theirs = HFLM(pretrained=model, **alike)
    qwen = HFLM(pretrained=make_qwen(len(processor.tokenizer)), **alike)

    def run(lm: Any, requests: Requests) -> list[Any]:
        if lm in (ours, single):
            lm.prefixes = PrefixCache(options.prefix_cache << 20)
        return requests.run(lm)

    rows = {}
    for name, requests in make_requests(words, questions).items():
        if options.tasks and name not in options.tasks:
            continue
        different = check_equal(requests, run(ours, requests), run(theirs, requests))
        variants = {
            name: functools.partial(run, lm, requests)
            for name, lm in (("batch", ours), ("single", single), ("qwen", qwen))
        }
        baseline = functools.partial(run, theirs, requests)
        pairs, _ = alternate(Clock("cpu", "cpu"), baseline, variants, repeats)
        rows[name] = {
            "questions": questions,
            "hf_seconds": pairs["batch"].baseline,
            "qwen_seconds": pairs["qwen"].variant,
            "seconds": pairs["batch"].variant,
            "speedup": pairs["batch"].speedup,
            "speedup_batch_1": pairs["single"].speedup,
            "speedup_over_qwen": pairs["batch"].speedup / pairs["qwen"].speedup,
            "different_texts": different,
        }
        Console(stderr=True).print(f"{name}: {_shown(pairs['batch'])}")
    settings = {"batch_size": batch_size, "repeats": repeats, "prefix_cache": options.prefix_cache}
    return settings | {"goal": GOAL, "tasks": rows}


def _shown(pairs: Pairs) -> str:
    return f"{pairs.baseline:.2f} s, {pairs.variant:.2f} s, {pairs.speedup:.2f} times as fast"


def print_report(report: dict[str, Any]) -> None:
    table = Table(
        title=f"lm-eval: its hf model, batch 1, against ours, batch {report['batch_size']}"
    )
    table.add_column("task", no_wrap=True)
    columns = ("hf, CPU s", "ours, CPU s", "times as fast", "at batch 1", "against Qwen3", "goal")
    for column in columns:
        table.add_column(column)
    for name, row in report["tasks"].items():
        table.add_row(
            name,
            f"{row['hf_seconds']:.2f}",
            f"{row['seconds']:.2f}",
            f"{row['speedup']:.2f}",
            f"{row['speedup_batch_1']:.2f}",
            f"{row['speedup_over_qwen']:.2f}",
            f"{GOAL:g}",
        )
    Console().print(table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="*", default=[], help="some of them (default: all)")
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    add_prefix_cache(parser)
    parser.add_argument("--json", type=Path, help="file that the figures are written to")
    options = parser.parse_args(argv)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    report = measure(options)
    print_report(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
