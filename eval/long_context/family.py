"""The long-context tasks over lengths, depths and samples, as the runner takes them.

`long/niah_single@4k` is one task and one length; its questions are made when they are asked for, so
that many prompts of 128k tokens are never in memory together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any, overload

from conceptmoe_vl.errors import UserError
from eval.long_context import image_tasks, keys
from eval.long_context.haystack import NOISE, load_haystack
from eval.long_context.prompt import (
    Draft,
    Drawing,
    PromptMeter,
    check_room,
    document_of,
    fit,
)
from eval.long_context.text_tasks import Place, Setting, needle, variable_tracking
from eval.long_context.word_tasks import common_words, frequent_words
from eval.tasks import Question, RatioOfSums, Scored, Task

PREFIX = "long/"
CONTROL = "control"
SPREAD = "all depths"
_REMEMBERED = 64  # questions, of all tasks together
_ANSWER_ROOM, _KEY_ROOM = 36, 12  # tokens an answer may have beside its keys, and for each of them


@dataclasses.dataclass(frozen=True)
class Generator:
    """One task.

    Fields:
        make: (random numbers, setting, place) -> a question without filler.
        describes: one line.
        one_depth: the needle is put at every depth of the grid; otherwise needles are spread.
        pictures: it needs a model that takes images.
    """

    make: Callable[[random.Random, Setting, Place], Draft]
    describes: str
    one_depth: bool = False
    pictures: bool = False


_partial = functools.partial
GENERATORS: dict[str, Generator] = {
    "niah_single": Generator(needle, "one number in a text", True),
    "niah_code": Generator(_partial(needle, shape="code"), "one long code in a text", True),
    "niah_multikey": Generator(
        _partial(needle, decoys=3), "one number of four with different names", True
    ),
    "niah_distractors": Generator(
        _partial(needle, among_needles=True), "one number in a text of such numbers", True
    ),
    "niah_multivalue": Generator(_partial(needle, values=4), "four numbers of one name"),
    "niah_multiquery": Generator(_partial(needle, asked=4), "the numbers of four names"),
    "variable_tracking": Generator(variable_tracking, "all variables with one value"),
    "common_words": Generator(common_words, "the ten most common words of a list"),
    "frequent_words": Generator(frequent_words, "the three most frequent coded words"),
    "mm_retrieve_text": Generator(
        image_tasks.retrieve_text, "one number in text with pictures", True, True
    ),
    "mm_retrieve_image": Generator(
        image_tasks.retrieve_image, "the number in one of many pictures", True, True
    ),
    "mm_count_text": Generator(
        _partial(image_tasks.count, in_images=False),
        "how often three names appear in text with pictures",
        pictures=True,
    ),
    "mm_count_image": Generator(
        _partial(image_tasks.count, in_images=True),
        "how many pictures show each of three figures",
        pictures=True,
    ),
    "mm_order_text": Generator(
        _partial(image_tasks.order, in_images=False),
        "the order of five names in text with pictures",
        pictures=True,
    ),
    "mm_order_image": Generator(
        _partial(image_tasks.order, in_images=True),
        "the order of five figures among pictures",
        pictures=True,
    ),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is asked of every task.

    Fields:
        lengths: tokens of the prompts.
        grid: depths, 0 to 1, rising.
        samples: questions at each depth; so many controls at each length.
        seed: of all that is random.
        haystack: what `load_haystack` takes.
        pictures: the user's pictures; None: drawn ones.
    """

    lengths: Sequence[int]
    grid: Sequence[float]
    samples: int
    seed: int = 0
    haystack: str = NOISE
    pictures: Sequence[Drawing] | None = None


class LazyQuestions(Sequence[Question]):
    """Questions that are made when they are looked at, always the same ones."""

    def __init__(self, make: Callable[[Any], Question], places: Sequence[Any]) -> None:
        self._make = make
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Question: ...
    @overload
    def __getitem__(self, index: slice) -> LazyQuestions: ...
    def __getitem__(self, index: int | slice) -> Question | LazyQuestions:
        if isinstance(index, slice):
            return LazyQuestions(self._make, self._places[index])
        return self._make(self._places[index])


def long_tasks(processor: Any, names: Sequence[str], plan: Plan) -> list[Task]:
    """Every named task at every length of the plan.

    Args:
        processor: of the model; its tokenizer and image sizes make the lengths.
        names: of `GENERATORS`, with or without `long/`.

    Raises:
        UserError: an unknown name, a task with pictures for a model without, or a length that is
            too short for a question of a task.
    """
    meter = PromptMeter(processor)
    haystack = load_haystack(plan.haystack, plan.seed)
    chosen = {name.removeprefix(PREFIX): _generator(name, meter) for name in names}

    # Whoever asks looks at a question several times: for its key, to ask it, to score it.
    @functools.lru_cache(maxsize=_REMEMBERED)
    def make(name: str, length: int, place: Place, number: int) -> Question:
        setting = Setting(haystack, meter, length, plan.grid, plan.pictures)
        return _question(name, chosen[name], setting, plan.seed, place, number)

    for name in chosen:  # before hours of asking
        for length in plan.lengths:
            setting = Setting(haystack, meter, length, plan.grid, plan.pictures)
            _check_all_fit(name, chosen[name], setting, plan)
    return [
        _task(name, chosen[name], length, plan, meter, make)
        for name in chosen
        for length in plan.lengths
    ]


def _check_all_fit(name: str, generator: Generator, setting: Setting, plan: Plan) -> None:
    """Compares the longest of a task's bare questions with the length; how many needles they have,
    and how long their names are, is random.

    Raises:
        UserError: it is longer; says by how much.
    """
    drafts = (
        generator.make(_rng(name, setting, plan.seed, place, number), setting, place)
        for place, number in _places(generator, plan)
    )
    longest = max(setting.meter.tokens(draft.content(0)) for draft in drafts)
    check_room(longest, setting.length, _full_name(name, setting.length))


def _generator(name: str, meter: PromptMeter) -> Generator:
    known = GENERATORS.get(name.removeprefix(PREFIX))
    if known is None:
        near = difflib.get_close_matches(name.removeprefix(PREFIX), GENERATORS, n=1, cutoff=0.0)[0]
        raise UserError(
            f"--tasks: unknown task '{name}'; the nearest is '{near}', all: {', '.join(GENERATORS)}"
        )
    if known.pictures and not meter.takes_images:
        raise UserError(
            f"--tasks: {name} needs pictures, and this model takes none (vision: null); leave it "
            "out"
        )
    return known


def _task(
    name: str,
    generator: Generator,
    length: int,
    plan: Plan,
    meter: PromptMeter,
    make: Callable[[str, int, Place, int], Question],
) -> Task:
    questions = LazyQuestions(lambda chosen: make(name, length, *chosen), _places(generator, plan))
    # Of all questions of a task the answers are of one form; the first tells their length.
    wanted = questions[0].details["wanted"]
    room = _ANSWER_ROOM + _KEY_ROOM * len(wanted)
    return Task(
        name=_full_name(name, length),
        description=f"{generator.describes}, {length} tokens",
        default_data="",
        load=lambda folder: questions,
        parse=lambda text, question: keys.parse(text, question.details, document_of(question.text)),
        score=lambda parsed, question: keys.score(parsed, question.details),
        max_new_tokens=meter.answer_tokens(", ".join(wanted)) + room,
        metrics=figures,
        shares_prefixes=False,  # a text of its own each, whose state would be held twice
    )


def _places(generator: Generator, plan: Plan) -> list[tuple[Place, int]]:
    """Which questions a task asks at each length: places with numbers from 0."""
    count = range(plan.samples)
    if generator.one_depth:
        places = [(Place(depth), number) for depth in plan.grid for number in count]
    else:
        places = [(Place(None), number) for number in range(len(plan.grid) * plan.samples)]
    return places + [(Place(None, control=True), number) for number in count]


def _full_name(name: str, length: int) -> str:
    return f"{PREFIX}{name}@{length_name(length)}"


def _question(
    name: str, generator: Generator, setting: Setting, seed: int, place: Place, number: int
) -> Question:
    """The question that the arguments stand for; it depends on nothing else."""
    draft = generator.make(_rng(name, setting, seed, place, number), setting, place)
    amount = fit(
        lambda amount: setting.meter.tokens(draft.content(amount)),
        setting.length,
        _full_name(name, setting.length),
    )
    content = draft.content(amount)
    details = {
        "length": setting.length,
        "tokens": setting.meter.tokens(content),
        "depth": place.depth,
        "depths": draft.depths,
        "control": place.control,
        "shape": draft.shape,
        "wanted": draft.wanted,
        "haystack": setting.haystack.name,
        "images": sum(part["type"] == "image" for part in content),
    }
    messages = [{"role": "user", "content": content}]
    key = _key(place, number)
    return Question(key, messages, [", ".join(draft.wanted)], _kind(place), details=details)


def _kind(place: Place) -> str:
    return CONTROL if place.control else SPREAD if place.depth is None else f"depth {place.depth:g}"


def _key(place: Place, number: int) -> str:
    return f"{_kind(place).replace(' ', '-')}-{number}"


def _rng(name: str, setting: Setting, seed: int, place: Place, number: int) -> random.Random:
    return random.Random(f"{seed} {name} {setting.length} {_key(place, number)}")


def _parts(sample: Scored) -> dict[str, tuple[float, float]]:
    control = float(sample.question.details["control"])
    return {
        "accuracy": (sample.score * (1 - control), 1 - control),
        "control": (sample.score * control, control),
        "control_named": (bool(sample.parsed) * control, control),
    }


figures = RatioOfSums(_parts)
"""The figures of a task. `accuracy` leaves the controls out; `control` is what the same questions
score without their needles, which is what guessing gives; `control_named` is the share of controls
whose answer names a key all the same."""


def length_name(length: int) -> str:
    """4096 as `4k`, others in digits."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def read_length(text: str, option: str = "--length") -> int:
    """`16k` or a plain number of tokens.

    Raises:
        UserError: it is no number of 1 or more; names the option.
    """
    word = text.strip().lower()
    digits, factor = (word[:-1], 1024) if word.endswith("k") else (word, 1)
    if not digits.isdecimal() or int(digits) < 1:
        raise UserError(f"{option}: '{word}' is no length; give tokens, such as 4k or 16384")
    return int(digits) * factor


def read_lengths(text: str) -> list[int]:
    """`1k,4k,16k` or plain numbers of tokens, with commas; each once, rising.

    Raises:
        UserError: one is no number of 1 or more.
    """
    lengths = {read_length(part, "--lengths") for part in text.split(",") if part.strip()}
    if not lengths:
        raise UserError("--lengths names no length; give tokens, such as 1k,4k,16k")
    return sorted(lengths)


def read_depths(text: str) -> list[float]:
    """A number of depths, evenly from 0 to 1 (one alone: 0.5), or the depths themselves with
    commas.

    Raises:
        UserError: no whole number of 1 or more, and no list of depths in 0 to 1.
    """
    depths: list[float] = []
    if text.strip().isdecimal():
        count = int(text)
        depths = [0.5] if count == 1 else [round(n / (count - 1), 4) for n in range(count)]
    else:
        with contextlib.suppress(ValueError):
            depths = sorted({float(part) for part in text.split(",") if part.strip()})
    if not depths or not 0 <= depths[0] <= depths[-1] <= 1:
        raise UserError(
            f"--depths is '{text}'; give their number, such as 5, or depths from 0 to 1, such as "
            "0,0.5,1.0"
        )
    return depths
