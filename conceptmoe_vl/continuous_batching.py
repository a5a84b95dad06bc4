"""Many prompts through one batch: a row that has ended makes room for the next prompt.

Notable:
- rows advance on their own in the two-level cache, so new prompts join running answers
  (`ConceptCache.join`), and no row waits for the longest answer of its batch;
- prompts are taken one by one from an iterable and read as late as possible: pictures of a large
  data set are never in memory together;
- nothing is padded: neither prompts nor rows of the cache cost what their neighbours are longer;
- what prompts share with earlier ones is computed once (`prefixes`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from conceptmoe_vl.asking import Answer, check_finite, check_reachable, end_ids, make_answer
from conceptmoe_vl.cache import ConceptCache
from conceptmoe_vl.likelihoods import LogLikelihood, OnPrompt, log_likelihoods
from conceptmoe_vl.prefixes import Prefix, PrefixCache, rest_of
from conceptmoe_vl.processing import EncodedSample
from conceptmoe_vl.requests import Prompt, Rendered, RequestError, encode_prompt, padded_inputs

__all__ = ["LogLikelihood", "Rendered", "RequestError", "generate_all", "log_likelihoods"]

# Tokens of one prefill: enough to fill the products, few enough for their states to stay small.
_PREFILL_TOKENS = 16384
# Tokens that rows times their longest may come to; with 16 rows 16,384 each.
MAX_CACHED_TOKENS = 1 << 18
# Generation settings that change a greedy choice, in transformers' names.
_CHANGES_GREEDY = (
    *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "bad_words_ids"),
    *("encoder_no_repeat_ngram_size", "min_length", "min_new_tokens", "suppress_tokens"),
    *("begin_suppress_tokens", "sequence_bias", "forced_bos_token_id", "forced_eos_token_id"),
    *("exponential_decay_length_penalty", "guidance_scale", "watermarking_config"),
)


@torch.inference_mode()
def generate_all(
    model: Any,
    processor: Any,
    conversations: Iterable[Prompt],
    max_new_tokens: int = 64,
    batch_size: int = 16,
    stop: Sequence[str] = (),
    compression: float | None = None,
    on_answer: Callable[[int, Answer], None] | None = None,
    max_cached_tokens: int = MAX_CACHED_TOKENS,
    prefixes: PrefixCache | None = None,
    on_prompt: OnPrompt | None = None,
) -> list[Answer]:
    """Greedy answers to any number of prompts: the text that each gets alone.

    Logits of a batch and of a row alone differ by rounding (about 1e-6 in float32): only where two
    tokens are that close may the text differ.

    Args:
        conversations: lists of messages, each ending with a user turn, or rendered texts; see
            [`encode_prompt`]. They are taken as there is room for them.
        max_new_tokens: most tokens an answer may have.
        batch_size: most rows at a time.
        stop: an answer ends before the first of these strings.
        compression: wanted tokens per concept; None: what the model was trained for.
        on_answer: called with an answer's number and itself as soon as it has ended; answers end in
            any order.
        max_cached_tokens: bounds the cache: most that the number of rows times the longest one
            (prompt and `max_new_tokens`) may be. A prompt that is longer alone is asked alone.
        prefixes: what prompts share with those of earlier calls; None: with those of this one.
        on_prompt: called for each prompt when it has been computed, before its answer.

    Returns:
        The answers in the order of the prompts.

    Raises:
        RequestError: a prompt cannot be asked; nothing is skipped. Prompts behind it have not been
            taken.
        UserError: the model cannot reach the compression, or its logits are not finite.
        ValueError: a number is below 1.
    """
    for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} is {value}; give 1 or more")
    check_reachable(model, compression)
    stop = tuple(filter(None, stop))
    answers: dict[int, Answer] = {}
    prefixes = PrefixCache() if prefixes is None else prefixes
    asker = _Asker(model, processor, max_new_tokens, stop, compression, prefixes, on_prompt)
    prompts = _Prompts(model, processor, conversations, max_new_tokens, max_cached_tokens)
    run = _answers_alone if _changes_greedy(model) else _answers
    for row in run(asker, prompts, batch_size):
        answer = make_answer(row.prompt, row.generated, model, processor, stop)
        answers[row.number] = answer
        if on_answer is not None:
            on_answer(row.number, answer)
    return [answers[number] for number in range(len(answers))]


@dataclasses.dataclass
class _Row:
    """A prompt that is being answered."""

    number: int
    prompt: list[int]
    generated: list[int] = dataclasses.field(default_factory=list)
    ended: bool = False


_Numbered = tuple[int, EncodedSample]


class _Prompts:
    """The prompts that wait, read one ahead."""

    def __init__(
        self,
        model: Any,
        processor: Any,
        conversations: Iterable[Prompt],
        max_new_tokens: int,
        max_cached_tokens: int,
    ) -> None:
        self._waiting = (
            (number, encode_prompt(model, processor, prompt, number))
            for number, prompt in enumerate(conversations)
        )
        self._max_new_tokens, self._max_cached_tokens = max_new_tokens, max_cached_tokens
        self._next = next(self._waiting, None)

    @property
    def waits(self) -> bool:
        return self._next is not None

    def take(self, running: Sequence[_Row], room: int) -> list[_Numbered]:
        """The next prompts that fit beside the running rows; at least one where none runs."""
        taken: list[_Numbered] = []
        longest = max((len(row.prompt) for row in running), default=0)
        tokens = 0
        while self._next is not None and len(taken) < room:
            length = len(self._next[1].input_ids)
            longest, tokens = max(longest, length), tokens + length
            rows = len(running) + len(taken) + 1
            cached = rows * (longest + self._max_new_tokens)
            if rows > 1 and cached > self._max_cached_tokens:
                break
            if taken and tokens > _PREFILL_TOKENS:
                break
            taken.append(self._next)
            self._next = next(self._waiting, None)
        return taken


class _Asker:
    """Runs the model for rows and says when a row has ended."""

    def __init__(
        self,
        model: Any,
        processor: Any,
        max_new_tokens: int,
        stop: tuple[str, ...],
        compression: float | None,
        prefixes: PrefixCache,
        on_prompt: OnPrompt | None,
    ) -> None:
        self.model, self.processor, self.stop = model, processor, stop
        self.max_new_tokens, self.compression = max_new_tokens, compression
        self.prefixes, self.on_prompt = prefixes, on_prompt
        self._ends = end_ids(model)
        # A stop string ends in the newest token; a token holds a byte at least, a character four at
        # most, and the first ones decoded may begin inside a character.
        self._tail = 4 * max((len(mark) for mark in stop), default=0) + 8

    def prefill(self, prompts: Sequence[_Numbered]) -> tuple[list[_Row], ConceptCache]:
        """Rows with their first tokens, and the cache of them alone."""
        whole: list[_Numbered] = []
        cut: list[_Numbered] = []
        found: list[Prefix] = []
        for number, sample in prompts:
            cuts = self.prefixes.cuts(self.processor, sample)
            prefix = self.prefixes.behind(self.model, sample, cuts, self.compression)
            if prefix is None:
                whole.append((number, sample))
            else:
                cut.append((number, sample))
                found.append(prefix)
        rows, cache = self._prefill(whole, []) if whole else ([], None)
        if not cut:
            assert cache is not None  # there are prompts
            return rows, cache
        more, filled = self._prefill(cut, found)
        if cache is None:
            return more, filled
        cache.join(filled)
        return [*rows, *more], cache

    def _prefill(
        self, prompts: Sequence[_Numbered], prefixes: Sequence[Prefix]
    ) -> tuple[list[_Row], ConceptCache]:
        """Prompts behind a prefix each, or all without."""
        rows = [_Row(number, sample.input_ids) for number, sample in prompts]
        before: Sequence[Prefix | None] = prefixes or [None] * len(prompts)
        rests = [rest_of(sample, own) for (_, sample), own in zip(prompts, before, strict=True)]
        lengths = [len(rest.input_ids) for rest in rests]
        cache = None
        if prefixes:
            cache = ConceptCache.stacked([own.cache for own in prefixes], room=max(lengths))
        out = self._advance(rows, padded_inputs(self.model, rests), cache)
        if self.on_prompt is not None:
            fired = out.chunks.boundary_mask.cpu().split(lengths)
            for row, own, fired_T in zip(rows, before, fired, strict=True):
                known = [] if own is None else [own.boundary_T]
                self.on_prompt(row.number, row.prompt, torch.cat((*known, fired_T)))
        return rows, out.cache

    def step(self, rows: Sequence[_Row], cache: ConceptCache) -> None:
        """One more token for every row; those that have ended ride along."""
        last = torch.tensor([[row.generated[-1]] for row in rows], device=self.model.device)
        self._advance(rows, {"input_ids": last}, cache)

    def _advance(
        self, rows: Sequence[_Row], inputs: dict[str, Tensor], cache: ConceptCache | None
    ) -> Any:
        out = self.model(
            **inputs,
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
            return_losses=False,
            compression=self.compression,
        )
        logits = out.logits[:, -1].float()
        image = self.model.config.image_token_id
        if image is not None:  # no image would stand behind its placeholder
            logits[:, image] = float("-inf")
        largest, tokens = logits.max(-1)
        check_finite(bool(largest.isfinite().all()))
        for row, token in zip(rows, tokens.tolist(), strict=True):
            if not row.ended:
                row.generated.append(token)
                row.ended = self._has_ended(row.generated)
        return out

    def _has_ended(self, generated: list[int]) -> bool:
        if generated[-1] in self._ends or len(generated) >= self.max_new_tokens:
            return True
        if not self.stop:
            return False
        tail = self.processor.tokenizer.decode(generated[-self._tail :], skip_special_tokens=False)
        return any(mark in tail for mark in self.stop)


def _answers(asker: _Asker, prompts: _Prompts, batch_size: int) -> Iterator[_Row]:
    """Rows as they end.

    A prefill and a new cache for every row that ends would cost more than they gain: a quarter of
    the batch is replaced together, and rows that have ended ride along until then.
    """
    rows: list[_Row] = []
    cache: ConceptCache | None = None
    group = max(batch_size // 4, 1)
    while True:
        running = [row for row in rows if not row.ended]
        room = batch_size - len(running)
        taken = prompts.take(running, room) if room >= group or not running else []
        keep = [index for index, row in enumerate(rows) if not row.ended]
        if taken:
            new, filled = asker.prefill(taken)
            if cache is not None and keep:
                cache.join(filled, keep)
            else:
                cache = filled
            rows = [*running, *new]
            yield from (row for row in new if row.ended)
            continue
        if not running:
            return
        assert cache is not None  # rows run
        if len(running) <= len(rows) // 2:
            cache, rows = cache.rows(keep), running
        before = running
        asker.step(rows, cache)
        yield from (row for row in before if row.ended)


def _changes_greedy(model: Any) -> bool:
    """Whether the model's generation settings change what is likeliest."""
    settings = (getattr(model.generation_config, name, None) for name in _CHANGES_GREEDY)
    return any(value not in (None, False, 0, 1, [], ()) for value in settings)


def _answers_alone(asker: _Asker, prompts: _Prompts, batch_size: int) -> Iterator[_Row]:
    """Rows one by one by transformers' `generate`, which knows all settings."""
    model, tokenizer = asker.model, asker.processor.tokenizer
    stopping = {"stop_strings": list(asker.stop), "tokenizer": tokenizer} if asker.stop else {}
    while prompts.waits:
        for number, sample in prompts.take((), 1):
            inputs = padded_inputs(model, [sample])
            with _first_boundaries(model) as found:
                ids = model.generate(
                    **inputs,
                    max_new_tokens=asker.max_new_tokens,
                    do_sample=False,
                    compression=asker.compression,
                    **stopping,
                )
            if asker.on_prompt is not None:
                asker.on_prompt(number, sample.input_ids, found[0])
            prompt = len(sample.input_ids)
            yield _Row(number, sample.input_ids, ids[0, prompt:].tolist(), ended=True)


@contextlib.contextmanager
def _first_boundaries(model: Any) -> Iterator[list[Tensor]]:
    """Boundaries of the first call inside, of which `generate` tells nothing: those of a prompt."""
    found: list[Tensor] = []

    def read(_model: Any, _inputs: tuple, output: Any) -> None:
        if not found:
            found.append(output.chunks.boundary_mask.cpu())

    handle = model.register_forward_hook(read)
    try:
        yield found
    finally:
        handle.remove()
