"""Needle retrieval and variable tracking in text, in the manner of RULER.

Every prompt begins with an example in the needles' own words and with as many keys as are asked
for, and names these keys again before its question. They show the form of the answer, and they
make repeating the prompt's beginning or end worthless: each is wrong.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from eval.long_context.haystack import Haystack, Window, cut_pieces
from eval.long_context.keys import draw_keys, listed
from eval.long_context.prompt import Draft, Drawing, Placed, PromptMeter, closing, lay_out

_KINDS = {"number": "number", "code": "code"}
NONE = "If it is not there, answer: none."


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all questions of one length share.

    Fields:
        haystack: the text that needles are hidden in.
        meter: counts tokens.
        length: tokens of the whole prompt, at most.
        grid: depths, 0 to 1, rising.
        pictures: the user's pictures for the haystack; None: drawn ones.
    """

    haystack: Haystack
    meter: PromptMeter
    length: int
    grid: Sequence[float]
    pictures: Sequence[Drawing] | None = None

    def window(self, rng: random.Random) -> Window:
        return Window(self.haystack, self.haystack.start(rng))


@dataclasses.dataclass(frozen=True)
class Place:
    """Which question of a task is made.

    Fields:
        depth: of the wanted needle; None where the task spreads its needles, and in controls.
        control: the wanted needles are left out, the rest stays.
    """

    depth: float | None
    control: bool = False


def spread(rng: random.Random, grid: Sequence[float], count: int) -> list[float]:
    """Depths of several needles, rising: different ones of the grid as long as there are enough."""
    chosen = [*grid] * (count // len(grid)) + rng.sample(list(grid), count % len(grid))
    return sorted(chosen)


def needle(
    rng: random.Random,
    setting: Setting,
    place: Place,
    *,
    asked: int = 1,
    values: int = 1,
    decoys: int = 0,
    shape: str = "number",
    among_needles: bool = False,
    pictures: Sequence[Placed] = (),
) -> Draft:
    """Names have values: `The special number of amber-anchor is 4821937.`

    Args:
        asked: names that are asked for. values: values of each of them.
        decoys: names with a value that nobody asks for, at random depths.
        among_needles: the haystack itself consists of names with values.
        pictures: laid into the document beside the text.
    """
    kind, count = _KINDS[shape], asked * values
    hidden = setting.haystack.text
    names = draw_keys(rng, "name", asked + decoys + 1, absent=hidden)
    keys = draw_keys(rng, shape, 2 * count + decoys, absent=hidden)
    wanted, other, example = keys[:count], keys[count : count + decoys], keys[-count:]
    owners = [name for name in names[:asked] for _ in range(values)]
    rng.shuffle(owners)
    single = count == 1 and place.depth is not None
    depths = [place.depth or 0.0] if single else spread(rng, setting.grid, count)
    placed = list(pictures)
    if not place.control:
        placed += [
            Placed(depth, _needle_sentence(kind, owner, key))
            for depth, owner, key in zip(depths, owners, wanted, strict=True)
        ]
    placed += [
        Placed(rng.random(), _needle_sentence(kind, name, key))
        for name, key in zip(names[asked:-1], other, strict=True)
    ]
    window = _needle_window(rng, setting, kind, shape, names, keys) if among_needles else None
    window = window or setting.window(rng)
    plural = "s" if count > 1 else ""
    example_text = " ".join(_needle_sentence(kind, names[-1], key) for key in example)
    head = (
        f"Some special {kind}s are hidden in the following text. Remember them.\n"
        f"Example: from '{example_text}' the special {kind}{plural} of {names[-1]} "
        f"{'are' if plural else 'is'} {listed(example)}.\n\n"
    )
    tail = closing(
        example,
        f"What {'are all' if plural else 'is'} the special {kind}{plural} of "
        f"{listed(names[:asked])} in the text above? Answer with the {kind}{plural} alone. {NONE}",
    )
    return Draft(head, lambda amount: lay_out(window, amount, placed), tail, shape, wanted, depths)


def _needle_sentence(kind: str, name: str, key: str) -> str:
    return f"The special {kind} of {name} is {key}."


def _needle_window(
    rng: random.Random,
    setting: Setting,
    kind: str,
    shape: str,
    names: Sequence[str],
    keys: Sequence[str],
) -> Window:
    """A haystack of needles with other names and keys than those given."""
    most = min(setting.length // 8 + 1, 10_000)  # none has so few tokens; behind it they repeat
    others = draw_keys(rng, "name", most, absent=set(names))
    values = draw_keys(rng, shape, most, absent=set(keys))
    pieces: list[str] = []
    for name, value in zip(others, values, strict=True):
        pieces += cut_pieces(_needle_sentence(kind, name, value) + " ")
    return Window(Haystack("needles", pieces), 0)


def variable_tracking(
    rng: random.Random, setting: Setting, place: Place, *, hops: int = 4
) -> Draft:
    """A chain of assignments, `VAR ZUPOKA = 48213.` to `VAR NADEKU = VAR ZUPOKA.`, in order of
    depth. Asked are all variables that hold its value; a second chain holds another.

    Args:
        hops: assignments behind the first; the chain has one variable more.
    """
    hidden = setting.haystack.text
    variables = draw_keys(rng, "coded word", 3 * (hops + 1), absent=hidden)
    number = draw_keys(rng, lambda rng: str(rng.randrange(10_000, 100_000)), 3, absent=hidden)
    chains = [
        _chain(variables[start : start + hops + 1], value)
        for start, value in zip(range(0, len(variables), hops + 1), number, strict=True)
    ]
    depths = spread(rng, setting.grid, hops + 1)
    placed = [Placed(*item) for item in zip(depths, chains[0], strict=True)]
    if place.control:
        placed = []
    decoy_depths = sorted(rng.random() for _ in chains[1])
    placed += [Placed(*item) for item in zip(decoy_depths, chains[1], strict=True)]
    window, example = setting.window(rng), variables[2 * (hops + 1) :]
    head = (
        "Variables are assigned values in the following text. Keep track of them.\n"
        f"Example: after '{' '.join(chains[2])}' the variables with the value {number[2]} are "
        f"{listed(example)}.\n\n"
    )
    tail = closing(
        example,
        f"Which variables have the value {number[0]} in the text above? Answer with the names of "
        "all of them alone. If there is none, answer: none.",
    )
    return Draft(
        head,
        lambda amount: lay_out(window, amount, placed),
        tail,
        "coded word",
        variables[: hops + 1],
        depths,
    )


def _chain(variables: Sequence[str], value: str) -> list[str]:
    sources = [value, *(f"VAR {name}" for name in variables)]
    return [f"VAR {name} = {source}." for name, source in zip(variables, sources, strict=False)]
