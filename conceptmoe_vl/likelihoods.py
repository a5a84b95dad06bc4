"""Log-likelihoods of continuations: what multiple-choice questions and perplexities are scored by.

Notable:
- the choices of a question share the states of its prompt: it is computed once, and the two-level
  cache goes on from it with each choice, which gives the logits of one pass (invariant 4);
- the first token of every choice is read off the prompt's last state, so letters cost nothing more;
- a single continuation needs no cache: prompt and continuation are one packed document;
- what a prompt shares with earlier ones is not computed again (`prefixes`);
- logits exist for some states at a time, never for all of them (`token_scores`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from conceptmoe_vl.asking import check_reachable
from conceptmoe_vl.cache import ConceptCache
from conceptmoe_vl.image_processing import collate_images
from conceptmoe_vl.prefixes import PrefixCache, rest_of
from conceptmoe_vl.processing import EncodedSample
from conceptmoe_vl.requests import Prompt, Rendered, RequestError, encode_prompt, padded_inputs
from conceptmoe_vl.token_scores import LogLikelihood, TokenScores

# Tokens of one call, and tokens that the copies of prompts for their choices hold.
_CALL_TOKENS, _COPIED_TOKENS = 16384, 1 << 17
# Called with the number of a prompt's first request, its tokens and `[T]` their boundaries.
OnPrompt = Callable[[int, list[int], Tensor], None]


@dataclasses.dataclass
class Continuations:
    """A prompt and the continuations of it that are asked for.

    Fields:
        prompt: at least one token. ids: of each continuation, at least one.
        numbers: which request each continuation is.
        cuts: where the parts of the prompt end that others may share; see `prefixes`.
    """

    prompt: EncodedSample
    ids: list[tuple[int, ...]]
    numbers: list[int]
    cuts: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of the longest prompt and continuation."""
        return len(self.prompt.input_ids) + max(map(len, self.ids))


def log_likelihoods(
    model: Any,
    processor: Any,
    requests: Sequence[tuple[Prompt, str]],
    batch_size: int = 16,
    compression: float | None = None,
    prefixes: PrefixCache | None = None,
    on_prompt: OnPrompt | None = None,
) -> list[LogLikelihood]:
    """Log-likelihood of each continuation behind its prompt.

    Behind a conversation the continuation is the beginning of the answer, tokenised on its own as
    answers are in training. Behind a text it is tokenised as lm-eval does: spaces at the prompt's
    end belong to the continuation, prompt and continuation are tokenised together, and the
    continuation is what follows as many tokens as the prompt has alone. Behind an empty text stands
    the start token, or the end token of a tokenizer without one. The end mark is not scored.

    Args:
        requests: (prompt, continuation); prompts as in [`encode_prompt`]. Neighbours with the same
            prompt are computed together.
        batch_size: prompts of a call. On a CPU a prompt is always alone in its call, so that the
            results are the same to the bit whatever stands beside it and in whichever order.
        compression: wanted tokens per concept; None: what the model was trained for.
        prefixes: what prompts share with those of earlier calls; None: with those of this one.
        on_prompt: called for each prompt when it has been computed.

    Raises:
        RequestError: a prompt cannot be read, or a continuation is empty.
        UserError: the model cannot reach the compression, or its logits are not finite.
    """
    prefixes = PrefixCache() if prefixes is None else prefixes
    encoded = _encoded(model, processor, requests, prefixes)
    count = len(requests)
    return score_continuations(model, encoded, count, batch_size, compression, prefixes, on_prompt)


def _encoded(
    model: Any, processor: Any, requests: Sequence[tuple[Prompt, str]], prefixes: PrefixCache
) -> Iterator[Continuations]:
    numbered = enumerate(requests)
    for prompt, members in itertools.groupby(numbered, key=lambda entry: entry[1][0]):
        asked = [(number, continuation) for number, (_, continuation) in members]
        whole = Rendered(prompt) if isinstance(prompt, str) else prompt
        encoded = _prompt(model, processor, whole, asked[0][0])
        group = Continuations(encoded, [], [], prefixes.cuts(processor, encoded))
        for number, continuation in asked:
            ids = _continuation_ids(processor, whole, group.prompt, continuation)
            if not ids:
                raise RequestError(
                    number, f"the continuation {continuation!r} has no token; give a text"
                )
            group.ids.append(ids)
            group.numbers.append(number)
        yield group


def _prompt(
    model: Any, processor: Any, prompt: list[dict] | Rendered, number: int
) -> EncodedSample:
    if not isinstance(prompt, Rendered):
        return encode_prompt(model, processor, prompt, number)
    text = prompt.text.rstrip()
    if not text:
        return EncodedSample([start_token(processor)], [])
    return encode_prompt(model, processor, Rendered(text, prompt.images), number)


def start_token(processor: Any) -> int:
    """What stands before a text that begins with nothing."""
    tokenizer = processor.tokenizer
    start = tokenizer.bos_token_id
    return tokenizer.eos_token_id if start is None else start


def _continuation_ids(
    processor: Any, prompt: list[dict] | Rendered, encoded: EncodedSample, continuation: str
) -> tuple[int, ...]:
    if not isinstance(prompt, Rendered):
        return tuple(processor.text_ids(continuation))
    known = len(encoded.input_ids) if prompt.text.rstrip() else 0
    whole = processor.encode_text(prompt.text + continuation, encoded.images)
    return tuple(whole.input_ids[known:])


@torch.inference_mode()
def score_continuations(
    model: Any,
    groups: Iterator[Continuations],
    count: int,
    batch_size: int = 16,
    compression: float | None = None,
    prefixes: PrefixCache | None = None,
    on_prompt: OnPrompt | None = None,
) -> list[LogLikelihood]:
    """`log_likelihoods` of tokens.

    Args:
        count: of all continuations; their numbers go from 0 to it.
        prefixes: needed where prompts have cuts.

    Raises:
        ValueError: `batch_size` is below 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; give 1 or more")
    check_reachable(model, compression)
    if _prompts_alone(model):
        batch_size = 1
    prefixes = PrefixCache() if prefixes is None else prefixes
    results: dict[int, LogLikelihood] = {}
    for batch in _batches(groups, batch_size):
        kinds: dict[tuple[bool, bool], list[Continuations]] = {}
        for group in batch:
            kinds.setdefault((len(group.ids) > 1, bool(group.cuts)), []).append(group)
        for (several, _), members in kinds.items():
            call = _Call(model, members, compression, prefixes, on_prompt)
            results |= _score_choices(call) if several else _score_documents(call)
    return [results[number] for number in range(count)]


def _prompts_alone(model: Any) -> bool:
    """Whether each prompt gets a call of its own, so that no neighbour changes its last bits."""
    return model.device.type == "cpu"


def _batches(groups: Iterator[Continuations], batch_size: int) -> Iterator[list[Continuations]]:
    batch: list[Continuations] = []
    for group in groups:
        tokens = sum(entry.tokens for entry in batch)
        if batch and (len(batch) == batch_size or tokens + group.tokens > _CALL_TOKENS):
            yield batch
            batch = []
        batch.append(group)
    if batch:
        yield batch


@dataclasses.dataclass(frozen=True)
class _Call:
    """Prompts that are computed together: all have cuts, or none has."""

    model: Any
    groups: Sequence[Continuations]
    compression: float | None
    prefixes: PrefixCache
    on_prompt: OnPrompt | None

    def states(
        self, behind: Sequence[tuple[int, ...]], keep: bool
    ) -> tuple[Tensor, list[int], ConceptCache | None]:
        """States of the prompts, of those with cuts behind the last one, and of what follows them.

        Args:
            behind: tokens behind each prompt. keep: whether a cache is wanted.

        Returns:
            `[T, D]` states of all, where those of each prompt end, and the cache.
        """
        found = [
            self.prefixes.behind(self.model, group.prompt, group.cuts, self.compression)
            for group in self.groups
        ]
        rests = []
        for group, prefix, more in zip(self.groups, found, behind, strict=True):
            rest = rest_of(group.prompt, prefix)
            rests.append(EncodedSample([*rest.input_ids, *more], [], rest.images))
        known = [prefix.cache for prefix in found if prefix is not None]
        lengths = [len(rest.input_ids) for rest in rests]
        if keep or known:
            inputs = padded_inputs(self.model, rests) | {"use_cache": True}
            if known:
                inputs["cache"] = ConceptCache.stacked(known, room=max(lengths))
        else:
            inputs = _packed_inputs(self.model, rests)
        out = self.model(
            **inputs,
            return_logits=False,
            return_states=True,
            return_losses=False,
            compression=self.compression,
        )
        if self.on_prompt is not None:
            fired = out.chunks.boundary_mask.cpu().split(lengths)
            for group, prefix, own_T in zip(self.groups, found, fired, strict=True):
                before = [] if prefix is None else [prefix.boundary_T]
                ids = group.prompt.input_ids
                self.on_prompt(group.numbers[0], ids, torch.cat((*before, own_T))[: len(ids)])
        return out.states, list(itertools.accumulate(lengths)), out.cache


def _packed_inputs(model: Any, samples: Sequence[EncodedSample]) -> dict[str, Any]:
    """Documents end to end."""
    documents = [sample.input_ids for sample in samples]
    offsets = list(itertools.accumulate(map(len, documents), initial=0))
    inputs = {
        "input_ids": torch.tensor(list(itertools.chain(*documents))),
        "cu_seqlens": torch.tensor(offsets, dtype=torch.int32),
        **collate_images([image for sample in samples for image in sample.images]),
    }
    return {name: value.to(model.device) for name, value in inputs.items()}


def _score_documents(call: _Call) -> dict[int, LogLikelihood]:
    """Prompts with one continuation each: one call for both."""
    states_TD, ends, _ = call.states([group.ids[0][:-1] for group in call.groups], keep=False)
    where = [
        position
        for group, end in zip(call.groups, ends, strict=True)
        for position in range(end - len(group.ids[0]), end)
    ]
    pieces = TokenScores(call.model)
    numbers = [group.numbers[0] for group in call.groups for _ in group.ids[0]]
    targets = [token for group in call.groups for token in group.ids[0]]
    pieces.add(states_TD, where, targets, numbers)
    return pieces.results()


def _score_choices(call: _Call) -> dict[int, LogLikelihood]:
    """Prompts with several continuations. Equal ones are computed once: as rows of one product they
    would differ in their last bits, and the report would count no tie.
    """
    equal_to: dict[int, int] = {}
    different: list[Continuations] = []
    for group in call.groups:
        first_of: dict[tuple[int, ...], int] = {}
        for number, ids in zip(group.numbers, group.ids, strict=True):
            equal_to[number] = first_of.setdefault(ids, number)
        numbers = list(first_of.values())
        different.append(dataclasses.replace(group, ids=list(first_of), numbers=numbers))
    found = _score_different(dataclasses.replace(call, groups=different))
    return {number: found[first] for number, first in equal_to.items()}


def _score_different(call: _Call) -> dict[int, LogLikelihood]:
    """The first tokens of continuations come from the prompts' last states, the others from calls
    that go on behind copies of the prompts' caches.
    """
    pieces = TokenScores(call.model)
    longer = [
        (row, number, ids)
        for row, group in enumerate(call.groups)
        for number, ids in zip(group.numbers, group.ids, strict=True)
        if len(ids) > 1
    ]
    states_TD, ends, cache = call.states([()] * len(call.groups), keep=bool(longer))
    for end, group in zip(ends, call.groups, strict=True):
        firsts = [ids[0] for ids in group.ids]
        pieces.add(states_TD, [end - 1] * len(firsts), firsts, group.numbers)
    prompts = [group.prompt.input_ids for group in call.groups]
    for part in _parts(longer, prompts):
        _continue(call.model, cache, part, pieces, call.compression)
    return pieces.results()


def _parts(
    longer: Sequence[tuple[int, int, tuple[int, ...]]], prompts: Sequence[list[int]]
) -> Iterator[list[tuple[int, int, tuple[int, ...]]]]:
    """Continuations whose copies of prompts fit into memory together."""
    part: list[tuple[int, int, tuple[int, ...]]] = []
    longest = 0
    for entry in longer:
        longest = max(longest, len(prompts[entry[0]]) + len(entry[2]))
        if part and (len(part) + 1) * longest > _COPIED_TOKENS:
            yield part
            part, longest = [], len(prompts[entry[0]]) + len(entry[2])
        part.append(entry)
    if part:
        yield part


def _continue(
    model: Any,
    cache: Any,
    part: Sequence[tuple[int, int, tuple[int, ...]]],
    pieces: TokenScores,
    compression: float | None,
) -> None:
    """Scores the second and later tokens of continuations (row, number, ids)."""
    samples = [EncodedSample(list(ids[:-1]), []) for _, _, ids in part]
    out = model(
        **padded_inputs(model, samples),
        cache=cache.rows([row for row, _, _ in part]),
        use_cache=True,
        return_logits=False,
        return_states=True,
        return_losses=False,
        compression=compression,
    )
    targets = [token for _, _, ids in part for token in ids[1:]]
    numbers = [number for _, number, ids in part for _ in ids[1:]]
    pieces.add(out.states, list(range(len(targets))), targets, numbers)
