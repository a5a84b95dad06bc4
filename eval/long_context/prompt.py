"""Prompts of an exact length: needles and pictures laid into filler, the filler cut to fit.

The length is that of the whole prompt as the model gets it: chat template, question, and pictures
after their expansion into tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from PIL import Image

from conceptmoe_vl.errors import UserError
from eval.long_context.haystack import Window

_CLOSING = "\n\n"
Part = Any
"""Of a message: a text, or a `Drawing`."""


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A picture that is made, or read, when it is called.

    Fields:
        size: width and height in pixels, upright.
        make: gives the encoded file.
        name: what it shows, for the record and the tests.
    """

    size: tuple[int, int]
    make: Callable[[], bytes]
    name: str = ""

    def __call__(self) -> bytes:
        return self.make()


@dataclasses.dataclass(frozen=True)
class Draft:
    """A question without its filler.

    Fields:
        head, tail: the words before and behind the document.
        body: how much filler -> the document. More filler never makes the prompt shorter by more
            than a few tokens.
        shape: of the keys, see `keys.read_keys`.
        wanted: the keys that the answer must name.
        depths: where each wanted key stands, 0 (first) to 1 (last); empty where it has no place.
    """

    head: str
    body: Callable[[int], list[Part]]
    tail: str
    shape: str
    wanted: list[str]
    depths: list[float] = dataclasses.field(default_factory=list)

    def content(self, amount: int) -> list[dict[str, Any]]:
        """The parts of the user's turn with so much filler."""
        return to_content([self.head, *self.body(amount), self.tail])


def closing(example: Sequence[str], question: str) -> str:
    """The words behind the document: keys as an answer has them, then the question.

    Args:
        example: wrong keys, as many as are asked for. They stand in front of the question, so that
            whoever repeats the prompt's end names them as soon as it names a key of the document.
    """
    return f"{_CLOSING}Example of an answer: {', '.join(example)}{_CLOSING}Question: {question}"


def document_of(prompt: str) -> str:
    """The words of a prompt between those of `Draft.head` and those of `Draft.tail`."""
    document, *_ = prompt.partition("\n\n")[2].rpartition(f"{_CLOSING}Question: ")
    return document.rpartition(f"{_CLOSING}Example of an answer: ")[0] or document


def to_content(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Parts as a message's content; neighbouring texts become one."""
    content: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, Drawing):
            content.append({"type": "image", "image": part})
        elif content and content[-1]["type"] == "text":
            content[-1]["text"] += part
        elif part:
            content.append({"type": "text", "text": part})
    return content


@dataclasses.dataclass(frozen=True)
class Placed:
    """A text or a picture at its depth in a document, 0 to 1."""

    depth: float
    part: Part


def lay_out(window: Window, amount: int, placed: Sequence[Placed]) -> list[Part]:
    """`amount` pieces of the window with the placed parts at the sentence ends nearest to them.

    Parts of one place keep the order of their depths.
    """
    parts: list[Part] = []
    done = 0
    for item in sorted(placed, key=lambda item: item.depth):
        place = max(window.nearest_end(item.depth * amount, amount), done)
        text = window.text(done, place)
        before = text or (parts[-1] if parts and isinstance(parts[-1], str) else "\n")
        if text:
            parts.append(text)
        if isinstance(item.part, str):
            # A needle in running text: blanks around it, no line of its own that gives it away.
            parts.append(("" if before[-1].isspace() else " ") + item.part + " ")
        else:
            parts.append(item.part)
        done = place
    rest = window.text(done, amount).rstrip()
    return [*parts, rest] if rest else parts


class PromptMeter:
    """Counts tokens of prompts without decoding a picture twice of the same size.

    Args:
        processor: a ConceptMoEVLProcessor.
    """

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self._image_tokens: dict[tuple[int, int], int] = {}

    @property
    def takes_images(self) -> bool:
        return self.processor.image_processor.accepts_images

    def image_tokens(self, size: tuple[int, int]) -> int:
        """Tokens of a picture of this width and height."""
        if size not in self._image_tokens:
            blank = Image.new("RGB", size)
            self._image_tokens[size] = self.processor.image_processor.process(blank).num_tokens
        return self._image_tokens[size]

    def tokens(self, content: list[dict[str, Any]]) -> int:
        """Tokens of the prompt that asks this one user turn."""
        pictures = [part["image"] for part in content if part["type"] == "image"]
        counts = [self.image_tokens(picture.size) for picture in pictures]
        return self.processor.count_tokens([{"role": "user", "content": content}], counts)

    def answer_tokens(self, answer: str) -> int:
        return len(self.processor.text_ids(answer))


def check_room(bare: int, limit: int, name: str) -> None:
    """Refuses a limit below the `bare` tokens of a prompt without filler.

    Raises:
        UserError: names the task, the limit and what is needed.
    """
    if bare > limit:
        raise UserError(
            f"{name}: {limit} tokens are too few, its question and needles alone take {bare} "
            "with this tokenizer; ask for a greater length"
        )


def fit(tokens: Callable[[int], int], limit: int, name: str) -> int:
    """The amount of filler with which a prompt fills its limit: `tokens(amount) <= limit`, and with
    one piece more it would not.

    Args:
        tokens: amount -> tokens of the prompt; nearly linear, each piece a token or more.
        name: of the task, for the error.

    Raises:
        UserError: the question alone is longer.
    """
    low, at_low = 0, tokens(0)
    check_room(at_low, limit, name)
    bare, high, at_high = at_low, None, 0
    guess, tries = max(1, (limit - at_low) // 2), 0
    while high is None or high - low > 1:
        found = tokens(guess)
        if found <= limit:
            low, at_low = guess, found
        else:
            high, at_high = guess, found
        tries += 1
        if high is None:
            slope = max((at_low - bare) / low, 0.5)
            guess = low + max(1, math.ceil((limit + 1 - at_low) / slope))
        elif tries > 12:  # not linear at all
            guess = (low + high) // 2
        else:
            share = (limit - at_low) / max(at_high - at_low, 1)
            guess = min(max(low + round(share * (high - low)), low + 1), high - 1)
    return low
