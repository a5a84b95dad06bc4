"""Log-likelihoods of continuations: what multiple-choice questions and perplexities are scored by.

Notable:
- the choices of a question share the states of its prompt: it is computed once, and the two-level
  cache goes on from it with each choice, which gives the logits of one pass (invariant 4);
- the first token of every choice is read off the prompt's last state, so letters cost nothing more;
- a single continuation needs no cache: prompt and continuation are one packed document;
- logits exist for some states at a time, never for all of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from conceptmoe_vl.asking import check_finite, check_reachable
from conceptmoe_vl.image_processing import collate_images
from conceptmoe_vl.processing import EncodedSample
from conceptmoe_vl.requests import Prompt, Rendered, RequestError, encode_prompt, padded_inputs

# Logits of one product: 16 MB in float32.
_LOGIT_ENTRIES = 1 << 22
# Tokens of one call, and tokens that the copies of prompts for their choices hold.
_CALL_TOKENS, _COPIED_TOKENS = 16384, 1 << 17


@dataclasses.dataclass(frozen=True)
class LogLikelihood:
    """How likely a continuation is behind its prompt.

    Fields:
        sum: natural logarithm of its probability.
        tokens: how many tokens it has.
        is_greedy: whether each of them is the likeliest: generation would write it.
    """

    sum: float
    tokens: int
    is_greedy: bool


@dataclasses.dataclass
class Continuations:
    """A prompt and the continuations of it that are asked for.

    Fields:
        prompt: at least one token. ids: of each continuation, at least one.
        numbers: which request each continuation is.
    """

    prompt: EncodedSample
    ids: list[tuple[int, ...]]
    numbers: list[int]

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

    Raises:
        RequestError: a prompt cannot be read, or a continuation is empty.
        UserError: the model cannot reach the compression, or its logits are not finite.
    """
    encoded = _encoded(model, processor, requests)
    return score_continuations(model, encoded, len(requests), batch_size, compression)


def _encoded(
    model: Any, processor: Any, requests: Sequence[tuple[Prompt, str]]
) -> Iterator[Continuations]:
    numbered = enumerate(requests)
    for prompt, members in itertools.groupby(numbered, key=lambda entry: entry[1][0]):
        asked = [(number, continuation) for number, (_, continuation) in members]
        whole = Rendered(prompt) if isinstance(prompt, str) else prompt
        group = Continuations(_prompt(model, processor, whole, asked[0][0]), [], [])
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
) -> list[LogLikelihood]:
    """`log_likelihoods` of tokens.

    Args:
        count: of all continuations; their numbers go from 0 to it.

    Raises:
        ValueError: `batch_size` is below 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; give 1 or more")
    check_reachable(model, compression)
    if _prompts_alone(model):
        batch_size = 1
    results: dict[int, LogLikelihood] = {}
    for batch in _batches(groups, batch_size):
        shared = [group for group in batch if len(group.ids) > 1]
        single = [group for group in batch if len(group.ids) == 1]
        for groups_of_kind, score in ((shared, _score_choices), (single, _score_documents)):
            if groups_of_kind:
                results |= score(model, groups_of_kind, compression)
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


def _score_documents(
    model: Any, groups: Sequence[Continuations], compression: float | None
) -> dict[int, LogLikelihood]:
    """Prompts with one continuation each: packed documents."""
    documents = [[*group.prompt.input_ids, *group.ids[0][:-1]] for group in groups]
    states_TD = _packed_states(model, documents, groups, compression)
    ends = itertools.accumulate(map(len, documents))
    where = [
        position
        for group, end in zip(groups, ends, strict=True)
        for position in range(end - len(group.ids[0]), end)
    ]
    pieces = _Pieces(model)
    numbers = [group.numbers[0] for group in groups for _ in group.ids[0]]
    targets = [token for group in groups for token in group.ids[0]]
    pieces.add(states_TD, where, targets, numbers)
    return pieces.results()


def _packed_states(
    model: Any,
    documents: Sequence[list[int]],
    groups: Sequence[Continuations],
    compression: float | None,
) -> Tensor:
    """`[T, D]` states of documents, one a group, with the images of their prompts."""
    offsets = list(itertools.accumulate(map(len, documents), initial=0))
    images = collate_images([image for group in groups for image in group.prompt.images])
    out = model(
        input_ids=torch.tensor(list(itertools.chain(*documents)), device=model.device),
        cu_seqlens=torch.tensor(offsets, dtype=torch.int32, device=model.device),
        **{name: value.to(model.device) for name, value in images.items()},
        return_logits=False,
        return_states=True,
        compression=compression,
    )
    return out.states


def _score_choices(
    model: Any, groups: Sequence[Continuations], compression: float | None
) -> dict[int, LogLikelihood]:
    """Prompts with several continuations. Equal ones are computed once: as rows of one product they
    would differ in their last bits, and the report would count no tie.
    """
    equal_to: dict[int, int] = {}
    different: list[Continuations] = []
    for group in groups:
        first_of: dict[tuple[int, ...], int] = {}
        for number, ids in zip(group.numbers, group.ids, strict=True):
            equal_to[number] = first_of.setdefault(ids, number)
        different.append(Continuations(group.prompt, list(first_of), list(first_of.values())))
    found = _score_different(model, different, compression)
    return {number: found[first] for number, first in equal_to.items()}


def _score_different(
    model: Any, groups: Sequence[Continuations], compression: float | None
) -> dict[int, LogLikelihood]:
    """The first tokens of continuations come from the prompts' last states, the others from calls
    that go on behind copies of the prompts' caches.
    """
    pieces = _Pieces(model)
    longer = [
        (row, number, ids)
        for row, group in enumerate(groups)
        for number, ids in zip(group.numbers, group.ids, strict=True)
        if len(ids) > 1
    ]
    prompts = [group.prompt.input_ids for group in groups]
    cache = None
    if longer:
        inputs = padded_inputs(model, [group.prompt for group in groups])
        out = model(
            **inputs,
            use_cache=True,
            return_logits=False,
            return_states=True,
            compression=compression,
        )
        states_TD, cache = out.states, out.cache
    else:
        states_TD = _packed_states(model, prompts, groups, compression)
    lasts = [end - 1 for end in itertools.accumulate(map(len, prompts))]
    for last, group in zip(lasts, groups, strict=True):
        firsts = [ids[0] for ids in group.ids]
        pieces.add(states_TD, [last] * len(firsts), firsts, group.numbers)
    for part in _parts(longer, prompts):
        _continue(model, cache, part, pieces, compression)
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
    pieces: _Pieces,
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
        compression=compression,
    )
    targets = [token for _, _, ids in part for token in ids[1:]]
    numbers = [number for _, number, ids in part for _ in ids[1:]]
    pieces.add(out.states, list(range(len(targets))), targets, numbers)


class _Pieces:
    """Sums the log-likelihoods of tokens by request."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._found: dict[int, list[tuple[float, bool]]] = {}

    def add(
        self,
        states_TD: Tensor,
        where: Sequence[int],
        targets: Sequence[int],
        numbers: Sequence[int],
    ) -> None:
        """Scores tokens.

        Args:
            where: index of the state that predicts each. targets: their ids. numbers: their
                requests.
        """
        head, image = self._model.lm_head, self._model.config.image_token_id
        step = max(_LOGIT_ENTRIES // head.weight.shape[0], 1)
        for start in range(0, len(where), step):
            part = slice(start, start + step)
            index = torch.tensor(where[part], device=states_TD.device)
            target = torch.tensor(targets[part], device=states_TD.device)
            logits = head(states_TD.index_select(0, index)).float()
            chosen = logits.gather(1, target[:, None]).squeeze(1)
            likelihoods = chosen - logits.logsumexp(-1)
            check_finite(bool(likelihoods.isfinite().all()))
            if image is not None:  # which generation never writes
                logits[:, image] = float("-inf")
            greedy = (logits.argmax(-1) == target).tolist()
            for number, *found in zip(numbers[part], likelihoods.tolist(), greedy, strict=True):
                self._found.setdefault(number, []).append((found[0], found[1]))

    def results(self) -> dict[int, LogLikelihood]:
        return {
            number: LogLikelihood(
                math.fsum(value for value, _ in found),
                len(found),
                all(greedy for _, greedy in found),
            )
            for number, found in self._found.items()
        }
