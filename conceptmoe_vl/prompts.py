"""Messages to token ids and labels: the one prompt builder of training, evaluation, demo and API.

Notable:
- a prompt is a row of special tokens and, between them, stretches of text; each stretch is
  tokenised once, whole, and with special tokens switched off, so what a user types stays text;
- assistant turns are marked where they are placed, never searched for, and no length is counted;
- the chat template is rendered once per sequence of roles, with marks in place of the contents, and
  tokenisations of short stretches are remembered: a question asked of many images costs a look-up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError

from conceptmoe_vl.errors import DataFaultError
from conceptmoe_vl.tokenizing import IMAGE, IMAGE_END, IMAGE_START

IGNORED = -100  # label of a token that is not supervised

# Three special tokens per question and answer. An answer has no header of its own: it stands
# between two end marks. Only a system turn starts with two start marks, which no user can type.
CHAT_TEMPLATE = """\
{%- macro write(content) -%}
{%- if content is string -%}{{ content }}{%- else -%}
{%- for part in content -%}
{%- if part['type'] == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part['type'] == 'text' -%}{{ part['text'] }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}<|im_start|><|im_start|>
{%- elif message['role'] == 'user' -%}<|im_start|>{%- endif -%}
{{ write(message['content']) }}<|im_end|>
{%- endfor -%}"""

_REMEMBERED_STRETCHES, _LONGEST_REMEMBERED = 65536, 512  # about 50 MB at most
_MARK = re.compile("\ue000([0-9]+)\ue001")
_ROLES = ("system", "user", "assistant")


class MessageError(DataFaultError):
    """Messages that are no conversation.

    Attributes:
        reason: bad_role | bad_order | bad_content | missing_field.
        field: where in the messages, `[2].role`; empty: the messages as a whole.
    """


@dataclass(frozen=True)
class Turn:
    """One message: its role and its parts in order, texts as `str`, pictures as `Picture`."""

    role: str
    parts: tuple[Any, ...]


@dataclass(frozen=True)
class Picture:
    """An image part: what stands at its key `image`; None for a bare placeholder."""

    image: Any


def read_messages(messages: Any, add_generation_prompt: bool = False) -> list[Turn]:
    """Checks messages and returns their turns.

    Order: at most one system turn, first; then user and assistant in turn, user first.

    Raises:
        MessageError: names the message by its number (from 0) and the remedy.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise MessageError("missing_field", "there are no messages; give a list of at least one")
    turns = [_read_turn(number, message) for number, message in enumerate(messages)]
    roles = [turn.role for turn in turns]
    start = 1 if roles[0] == "system" else 0
    for number, role in enumerate(roles[start:], start=start):
        expected = ("user", "assistant")[(number - start) % 2]
        if role != expected:
            raise MessageError(
                "bad_order",
                f"message {number} is of role '{role}', but '{expected}' is due there",
                f"[{number}].role",
            )
    if add_generation_prompt and roles[-1] != "user":
        raise MessageError(
            "bad_order", f"the last message is of role '{roles[-1]}'; an answer follows a user turn"
        )
    return turns


def _read_turn(number: int, message: Any) -> Turn:
    if not isinstance(message, dict):
        raise MessageError(
            "bad_content", f"message {number} is no mapping; give role and content", f"[{number}]"
        )
    for field in ("role", "content"):
        if field not in message:
            raise MessageError(
                "missing_field", f"message {number} has no '{field}'; add it", f"[{number}].{field}"
            )
    role, content = message["role"], message["content"]
    if role not in _ROLES:
        raise MessageError(
            "bad_role",
            f"message {number} has the role {repr(role)[:80]}; choose one of {list(_ROLES)}",
            f"[{number}].role",
        )
    if isinstance(content, str):
        return Turn(role, (content,))
    if not isinstance(content, (list, tuple)):
        raise MessageError(
            "bad_content",
            f"the content of message {number} is {repr(content)[:80]}; give text or a list of "
            "parts",
            f"[{number}].content",
        )
    return Turn(role, tuple(_read_part(number, part) for part in content))


def _read_part(number: int, part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    if kind == "image":
        given = [part[key] for key in ("image", "path", "url") if part.get(key) is not None]
        return Picture(given[0] if given else None)
    shown = repr(part)[:80]
    raise MessageError(
        "bad_content",
        f"message {number} holds the part {shown}; parts are {{'type': 'text', 'text': ...}} and "
        "{'type': 'image', 'image': ...}",
        f"[{number}].content",
    )


class PromptBuilder:
    """Turns to ids and labels for one tokenizer and one chat template.

    Args:
        tokenizer: a transformers tokenizer that knows the image marks.
        chat_template: Jinja. Directly behind an assistant's content it must write an end mark that
            is a special token.

    Raises:
        ValueError: the tokenizer lacks an image mark.
    """

    def __init__(self, tokenizer: Any, chat_template: str) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        added = {str(token): index for index, token in tokenizer.added_tokens_decoder.items()}
        special = {
            text: index
            for text, index in added.items()
            if tokenizer.added_tokens_decoder[index].special
        }
        missing = [token for token in (IMAGE_START, IMAGE, IMAGE_END) if token not in special]
        if missing:
            raise ValueError(
                f"the tokenizer has no special token {missing[0]}; call "
                "conceptmoe_vl.tokenizing.add_special_tokens(tokenizer) first"
            )
        self.special_ids = special
        self.image_ids = (special[IMAGE_START], special[IMAGE], special[IMAGE_END])
        longest_first = sorted(special, key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        self._remembered = lru_cache(maxsize=_REMEMBERED_STRETCHES)(self._tokenise)
        self._skeleton = lru_cache(maxsize=1024)(self._render_skeleton)

    def build(
        self,
        turns: Sequence[Turn],
        image_tokens: Sequence[int],
        add_generation_prompt: bool = False,
    ) -> tuple[list[int], list[int]]:
        """Ids and labels; a label is the token's own id where it is supervised, else -100.

        Supervised: each assistant turn's content and its end mark, nothing else.

        Args:
            image_tokens: tokens of each picture, in reading order.
        """
        writer = _Writer(self.stretch_ids)
        counts = iter(image_tokens)
        closing = False
        for piece in self._skeleton(tuple(turn.role for turn in turns), add_generation_prompt):
            if isinstance(piece, str):
                writer.text(piece)
            elif piece[0] == "special":
                writer.special(piece[1], supervised=closing)
            else:
                turn = turns[piece[1]]
                writer.supervise(turn.role == "assistant")
                self._write_parts(writer, turn, counts)
            closing = not isinstance(piece, str) and piece[0] == "turn" and turn.role == "assistant"
            if not closing:
                writer.supervise(False)
        writer.flush()
        return writer.ids, writer.labels

    def _write_parts(self, writer: _Writer, turn: Turn, counts: Any) -> None:
        start, placeholder, end = self.image_ids
        for part in turn.parts:
            if isinstance(part, str):
                writer.text(part)
            else:
                writer.special(start)
                writer.repeat(placeholder, next(counts))
                writer.special(end)

    def from_text(self, text: str, image_tokens: Sequence[int]) -> list[int]:
        """Ids of an already rendered prompt: special tokens count, and each image mark grows.

        Raises:
            ValueError: image marks and images differ in number.
        """
        marks = text.count(IMAGE)
        if marks != len(image_tokens):
            raise ValueError(
                f"the text holds {marks} {IMAGE}, but {len(image_tokens)} images are given; "
                "use one each"
            )
        writer = _Writer(self.stretch_ids)
        counts = iter(image_tokens)
        for piece in self._split(text):
            if isinstance(piece, str):
                writer.text(piece)
            elif piece[1] == self.image_ids[1]:
                writer.repeat(piece[1], next(counts))
            else:
                writer.special(piece[1])
        writer.flush()
        return writer.ids

    def render(self, turns: Sequence[Turn], add_generation_prompt: bool = False) -> str:
        """The text of turns, one image mark a picture: what `from_text` takes."""
        text = self._render_marks(tuple(turn.role for turn in turns), add_generation_prompt)
        picture = IMAGE_START + IMAGE + IMAGE_END
        contents = [
            "".join(part if isinstance(part, str) else picture for part in turn.parts)
            for turn in turns
        ]
        return _MARK.sub(lambda match: contents[int(match[1])], text)

    def _render_marks(self, roles: tuple[str, ...], add_generation_prompt: bool) -> str:
        # With torch: checks of records need neither.
        from transformers.utils.chat_template_utils import render_jinja_template

        messages = [
            {"role": role, "content": f"\ue000{number}\ue001"} for number, role in enumerate(roles)
        ]
        try:
            rendered, _ = render_jinja_template(
                conversations=[messages],
                chat_template=self.chat_template,
                add_generation_prompt=add_generation_prompt,
                **self.tokenizer.special_tokens_map,
            )
        except TemplateError as error:
            raise MessageError(
                "bad_order", f"the chat template refuses the roles {', '.join(roles)}: {error}"
            ) from error
        return rendered[0]

    def stretch_ids(self, text: str) -> Sequence[int]:
        """Ids of text without special meaning."""
        if len(text) <= _LONGEST_REMEMBERED:
            return self._remembered(text)
        return self._tokenise(text)

    def _tokenise(self, text: str) -> tuple[int, ...]:
        # Not verbose: it would warn of texts longer than the model's rows, which packing cuts.
        encoded = self.tokenizer(
            text, add_special_tokens=False, split_special_tokens=True, verbose=False
        )
        return tuple(encoded["input_ids"])

    def _split(self, text: str) -> list[Any]:
        """Stretches of text as `str`, special tokens as `("special", id)`."""
        pieces = (piece for piece in self._special.split(text) if piece)
        return [
            ("special", self.special_ids[piece]) if piece in self.special_ids else piece
            for piece in pieces
        ]

    def _render_skeleton(self, roles: tuple[str, ...], add_generation_prompt: bool) -> list[Any]:
        """The template's pieces around the contents, which stand as `("turn", number)`."""
        text = self._render_marks(roles, add_generation_prompt)
        pieces: list[Any] = []
        for index, part in enumerate(_MARK.split(text)):
            pieces += [("turn", int(part))] if index % 2 else self._split(part)
        placed = [piece[1] for piece in pieces if not isinstance(piece, str) and piece[0] == "turn"]
        if placed != list(range(len(roles))):
            raise ValueError(
                f"the chat template writes the messages {placed} of {len(roles)}; it must write "
                "each once and in order"
            )
        self._check_end_marks(roles, pieces)
        return pieces

    @staticmethod
    def _check_end_marks(roles: tuple[str, ...], pieces: list[Any]) -> None:
        for piece, behind in zip(pieces, [*pieces[1:], None], strict=True):
            if isinstance(piece, str) or piece[0] != "turn" or roles[piece[1]] != "assistant":
                continue
            if behind is None or isinstance(behind, str) or behind[0] != "special":
                raise ValueError(
                    "the chat template puts no special token directly behind an assistant's "
                    "content; the model would never learn to stop"
                )


class _Writer:
    """Collects ids and labels; joins neighbouring texts so that each stretch is tokenised whole."""

    def __init__(self, stretch_ids: Callable[[str], Sequence[int]]) -> None:
        self.ids: list[int] = []
        self.labels: list[int] = []
        self._stretch_ids = stretch_ids
        self._open: list[str] = []
        self._supervised = False

    def supervise(self, supervised: bool) -> None:
        """Ends the open stretch where supervision changes: headers are tokenised as in prompts."""
        if supervised != self._supervised:
            self.flush()
            self._supervised = supervised

    def text(self, text: str) -> None:
        self._open.append(text)

    def special(self, index: int, supervised: bool = False) -> None:
        self.flush()
        self.ids.append(index)
        self.labels.append(index if supervised else IGNORED)

    def repeat(self, index: int, count: int) -> None:
        self.flush()
        self.ids += [index] * count
        self.labels += [IGNORED] * count

    def flush(self) -> None:
        text = "".join(self._open)
        self._open.clear()
        if not text:
            return
        ids = self._stretch_ids(text)
        self.ids += ids
        self.labels += ids if self._supervised else [IGNORED] * len(ids)
