"""What prompts share with earlier ones is computed once: few-shot examples, instructions, an image.

Notable:
- where a prompt is cut depends on its own tokens alone, never on other prompts, and each part is
  computed behind the state of the one before it, also by the first prompt that has it: a hit gives
  the very states that a miss computes;
- a part is known by all tokens and image contents up to its end, so nothing can be confused;
- a kept state is copied by those who go on from it, and never changed.
"""

from __future__ import annotations

import array
import dataclasses
import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from conceptmoe_vl.cache import ConceptCache
from conceptmoe_vl.image_processing import ProcessedImage
from conceptmoe_vl.processing import EncodedSample
from conceptmoe_vl.requests import padded_inputs

PREFIX_BYTES = 1 << 30
"""Default bound of a cache's states."""

# A cut costs a call, which reads all weights once more: as much as 100 tokens of one pass with 15 M
# parameters on one CPU core. So a part is at least this long, and so are a question and its marks.
_SHORTEST, _SHORTEST_REST = 256, 8
# How vocabularies write the end of a line: itself, as a byte (SentencePiece), in byte-level BPE.
_LINE_ENDS = ("<0x0A>", "\u010a")


@dataclasses.dataclass(frozen=True)
class Prefix:
    """The state behind the first tokens of a prompt.

    Fields:
        cache: of one row; to be copied, never to be written. tokens, images: how many it has read.
        boundary_T: `[tokens]` bool, the boundaries among them, on the CPU.
    """

    cache: ConceptCache
    tokens: int
    images: int
    boundary_T: Tensor

    @property
    def bytes(self) -> int:
        state = self.cache.chunk.bytes + self.boundary_T.numel()
        return sum(self.cache.bytes.values()) + state


class PrefixCache:
    """States behind the parts that prompts share, the latest used ones up to a number of bytes.

    It serves one model, whose weights stay as they are, with any compression. Its size changes the
    time and no result, except for 0: then prompts are computed in one pass, which changes the last
    bits of those that would be cut.

    Args:
        max_bytes: most bytes that the states take, on the model's device.

    Attributes:
        bytes: what they take now. hits, misses: parts that were found and that were computed.

    Raises:
        ValueError: `max_bytes` is negative.
    """

    def __init__(self, max_bytes: int = PREFIX_BYTES) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes is {max_bytes}; give 0 or more")
        self.max_bytes = max_bytes
        self.bytes = self.hits = self.misses = 0
        self._model: Any = None
        self._held: OrderedDict[bytes, Prefix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def cuts(self, processor: Any, sample: EncodedSample) -> tuple[int, ...]:
        """Where the parts of a prompt end that others may share; see [`prompt_cuts`]."""
        return prompt_cuts(processor, sample.input_ids) if self.max_bytes else ()

    @torch.inference_mode()
    def behind(
        self, model: Any, sample: EncodedSample, cuts: Sequence[int], compression: float | None
    ) -> Prefix | None:
        """The state behind a prompt's last cut, computed as far as it is not held; None without
        cuts.

        Args:
            cuts: rising, below the prompt's length, none inside an image.

        Raises:
            ValueError: the cache serves another model.
        """
        if self._model is not None and self._model is not model:
            raise ValueError("a prefix cache serves one model; make another one for this model")
        self._model = model
        parts = _parts(model, sample, cuts)
        keys = _keys(parts, compression)
        known = max((n for n, key in enumerate(keys, start=1) if key in self._held), default=0)
        prefix = None
        for key in keys[:known]:
            if key in self._held:
                prefix = self._held[key]
                self._held.move_to_end(key)
                self.hits += 1
        for key, part in zip(keys[known:], parts[known:], strict=True):
            prefix = _go_on(model, prefix, part, compression)
            self.misses += 1
            self._keep(key, prefix)
        return prefix

    def _keep(self, key: bytes, prefix: Prefix) -> None:
        if prefix.bytes > self.max_bytes:
            return
        self._held[key] = prefix
        self.bytes += prefix.bytes
        while self.bytes > self.max_bytes:
            self.bytes -= self._held.popitem(last=False)[1].bytes


def prompt_cuts(processor: Any, ids: Sequence[int]) -> tuple[int, ...]:
    """Where a prompt's computation is cut: at most in two places, none inside an image.

    Behind its last image, where one is; and where the last turn or paragraph begins, of a prompt
    with images the last one before the last image. So a question stands behind its examples, and
    several questions about an image behind the image. Parts that are short are not cut off.

    Args:
        ids: the prompt's tokens; nothing else decides.
    """
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
    start, placeholder, end = (processor.special_token_ids[name] for name in names)

    def is_long(part: Sequence[int]) -> bool:
        # The vision tower reads image tokens too.
        return len(part) + part.count(placeholder) >= _SHORTEST

    last = len(ids) - _SHORTEST_REST
    if last < 1 or not is_long(ids[:last]):
        return ()
    shown = next((place for place in range(last, 0, -1) if ids[place - 1] == end), 0)
    if shown:
        last = next((place for place in range(shown - 1, -1, -1) if ids[place] == start), 0)
    special = set(processor.tokenizer.all_special_ids) - {start, placeholder, end}
    begins = _last_beginning(processor.tokenizer, ids, last, special)
    if shown and is_long(ids[begins:shown]):
        return (begins, shown) if begins else (shown,)
    return (begins,) if begins else ()


def _last_beginning(tokenizer: Any, ids: Sequence[int], last: int, special: set[int]) -> int:
    """The last place up to `last` behind an empty line or before special tokens; 0: none that is
    long enough.
    """
    first = max(_SHORTEST - 2, 0)
    texts = tokenizer.convert_ids_to_tokens(list(ids[first : last + 1]))
    for mark in _LINE_ENDS:
        texts = [text.replace(mark, "\n") for text in texts]
    for place in range(last, _SHORTEST - 1, -1):
        if ids[place] in special and ids[place - 1] not in special:
            return place
        *before, text = texts[max(place - 2 - first, 0) : place + 1 - first]
        if "".join(before).endswith("\n\n") and not text.startswith("\n"):
            return place
    return 0


def _parts(model: Any, sample: EncodedSample, cuts: Sequence[int]) -> list[EncodedSample]:
    """The pieces between cuts, each with its images."""
    placeholder = model.config.image_token_id
    ends = list(itertools.accumulate(image.num_tokens for image in sample.images))
    parts, shown = [], 0
    for start, stop in itertools.pairwise((0, *cuts)):
        read = sample.input_ids[:stop].count(placeholder) if ends else 0
        seen = sum(end <= read for end in ends)
        parts.append(EncodedSample(sample.input_ids[start:stop], [], sample.images[shown:seen]))
        shown = seen
    return parts


def _keys(parts: Sequence[EncodedSample], compression: float | None) -> list[bytes]:
    """A checksum for each part, of all up to its end and of where it was cut."""
    state = hashlib.sha256(repr(compression).encode())
    keys = []
    for part in parts:
        state.update(array.array("q", [len(part.input_ids), *part.input_ids]).tobytes())
        for image in part.images:
            state.update(_content(image))
        keys.append(state.digest())
    return keys


def _content(image: ProcessedImage) -> bytes:
    state = hashlib.sha256(repr((image.grid, image.thumbnail, tuple(image.pixels.shape))).encode())
    for tensor in (image.pixels, image.coord):
        if tensor is not None:
            state.update(tensor.contiguous().numpy())
    return state.digest()


def _go_on(
    model: Any, prefix: Prefix | None, part: EncodedSample, compression: float | None
) -> Prefix:
    tokens = len(part.input_ids)
    out = model(
        **padded_inputs(model, [part]),
        cache=None if prefix is None else ConceptCache.stacked([prefix.cache], room=tokens),
        use_cache=True,
        return_logits=False,
        return_losses=False,
        compression=compression,
    )
    out.cache.journal.clear()  # of the size of the part
    boundary_T = out.chunks.boundary_mask.cpu()
    if prefix is None:
        return Prefix(out.cache, tokens, len(part.images), boundary_T)
    return Prefix(
        out.cache,
        prefix.tokens + tokens,
        prefix.images + len(part.images),
        torch.cat((prefix.boundary_T, boundary_T)),
    )


def rest_of(sample: EncodedSample, prefix: Prefix | None) -> EncodedSample:
    """What of a prompt stands behind a prefix."""
    if prefix is None:
        return sample
    return EncodedSample(sample.input_ids[prefix.tokens :], [], sample.images[prefix.images :])
