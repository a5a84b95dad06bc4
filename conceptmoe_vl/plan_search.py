"""The search behind `conceptmoe_vl.planning`: which fields of C come near a baseline's cost.

Parameters are linear in the number of experts and in the width, FLOPs in the experts a concept
passes, so that every field is solved for and only the values about its solution are counted.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator

from conceptmoe_vl.configuration import ConceptMoEVLConfig
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.flops import count_parameters, forward_flops

PARAMETER_LIMIT, FLOPS_LIMIT = 0.005, 0.01
_WIDTH_MULTIPLES = (64, 32, 16, 8)  # grouped products need 16 bytes: eight bfloat16 values
_MOST_LOOPS = 200  # numbers of extra passes that are tried; with more of them not every one
_TOKENS = 2**20  # FLOPs a token are taken over so many: rounding T / R up no longer counts


@dataclasses.dataclass(frozen=True)
class Match:
    """Total parameters and FLOPs per token (module docstring) of two models: baseline, other."""

    parameters: tuple[int, int]
    flops: tuple[float, float]

    @property
    def parameter_miss(self) -> float:
        return self.parameters[1] / self.parameters[0] - 1

    @property
    def flops_miss(self) -> float:
        return self.flops[1] / self.flops[0] - 1

    @property
    def worst(self) -> float:
        """The larger miss in units of its limit."""
        return max(abs(self.parameter_miss) / PARAMETER_LIMIT, abs(self.flops_miss) / FLOPS_LIMIT)

    @property
    def is_matched(self) -> bool:
        return self.worst <= 1


def total_parameters(config: ConceptMoEVLConfig) -> int:
    return sum(count.total for count in count_parameters(config).values())


def flops_per_token(config: ConceptMoEVLConfig, ratio: float | None = None) -> float:
    """FLOPs of one text token in a forward pass, without attention maps and the head."""
    flops = forward_flops(config, _TOKENS, ratio)
    return sum(f.rest for name, f in flops.items() if name != "head") / _TOKENS


def compare(
    baseline: ConceptMoEVLConfig, config: ConceptMoEVLConfig, ratio: float | None = None
) -> Match:
    """How near `config` comes to `baseline`; `ratio` None: the configuration's target."""
    return Match(
        (total_parameters(baseline), total_parameters(config)),
        (flops_per_token(baseline), flops_per_token(config, ratio)),
    )


def changed(
    config: ConceptMoEVLConfig, text: dict | None = None, chunk: dict | None = None
) -> ConceptMoEVLConfig:
    """A copy with other fields of its sections, checked as everywhere."""
    twin = copy.copy(config)
    twin.text = dataclasses.replace(config.text, **(text or {}))
    twin.chunk = dataclasses.replace(config.chunk, **(chunk or {}))
    return twin


@dataclasses.dataclass(frozen=True)
class Task:
    """One search. `start`: the baseline with chunking; its concept fields are what is looked for.

    Attributes:
        free: the number of experts in C may change (not in pretrained layers).
        loops, width: given numbers of extra passes and of the concepts' width; None: searched.
    """

    baseline: ConceptMoEVLConfig
    start: ConceptMoEVLConfig
    ratio: float
    free: bool
    loops: int | None
    width: int | None
    parameters: int
    flops: float

    def with_fields(self, fields: dict) -> ConceptMoEVLConfig:
        return changed(self.start, fields)

    def match(self, config: ConceptMoEVLConfig) -> Match:
        return Match(
            (self.parameters, total_parameters(config)),
            (self.flops, flops_per_token(config, self.ratio)),
        )

    def near(self, fields: dict, name: str, low: int, high: int, step: int = 1) -> list[int]:
        """Values of `name` about the baseline's parameters."""

        def size(value: int) -> float:
            return total_parameters(self.with_fields({**fields, name: value}))

        return _near(size, self.parameters, PARAMETER_LIMIT, (low, high, step))

    def chosen(self, fields: dict, low: int) -> Iterator[dict]:
        """`fields` with numbers of experts a concept about the baseline's FLOPs."""
        held = fields.get("concept_num_experts") or self.start.text.num_experts
        name = "concept_num_experts_per_tok"

        def cost(chosen: int) -> float:
            return flops_per_token(self.with_fields({**fields, name: chosen}), self.ratio)

        for chosen in _near(cost, self.flops, FLOPS_LIMIT, (low, held, 1)):
            yield {**fields, name: chosen}

    def experts(self, fields: dict, other_number: bool) -> Iterator[dict]:
        """`fields` with more experts a concept.

        Args:
            other_number: C has another number of experts as well, which makes room for the
                parameters of chunking.
        """
        text, name = self.start.text, "concept_num_experts"
        options = [fields]
        if other_number:
            numbers = self.near(fields, name, text.num_experts_per_tok, 2 * text.num_experts)
            options = [{**fields, name: n} for n in numbers if n != text.num_experts]
        for option in options:
            yield from self.chosen(option, text.num_experts_per_tok)

    @property
    def tiers(self) -> list[bool]:
        """Whether C may have another number of experts: first not, then, from scratch, so."""
        return [False, True] if self.free else [False]


def _near(
    measure: Callable[[int], float], wanted: float, limit: float, span: tuple[int, int, int]
) -> list[int]:
    """The multiples of `step` in low..high where a linear `measure` is within `limit` of `wanted`,
    and the next ones on both sides.

    Args:
        limit: as a share of `wanted`. span: low, high, step; low and high are multiples of step.
    """
    low, high, step = span
    if low > high:
        return []
    first, last = measure(low), measure(high)
    if first == last:
        return [low]
    bounds = [
        (low + (wanted * (1 + side) - first) / (last - first) * (high - low)) / step
        for side in (-limit, limit)
    ]
    # Held to the span first: where the measure hardly changes, the bounds are far apart.
    least, most = (min(max(bound, low / step), high / step) for bound in sorted(bounds))
    return [place * step for place in range(math.floor(least), math.ceil(most) + 1)]


def loop_spans(layers: int, extra: int) -> list[list[int]]:
    """`concept_loops` that pass `extra` more layers than there are: the middle ones twice.

    With more extra passes than layers every layer is passed again as often as goes round.
    """
    rounds, rest = divmod(extra, layers)
    first = (layers - rest) // 2
    spans = [
        [0, first - 1, rounds + 1],
        [first, first + rest - 1, rounds + 2],
        [first + rest, layers - 1, rounds + 1],
    ]
    return [span for span in spans if span[0] <= span[1] and span[2] > 1]


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """Fields of `text`. away: distance from the paper's way. tier: later ones are looked at only
    where earlier ones give no match.
    """

    fields: dict
    away: float
    tier: int = 0


def _by_experts(task: Task) -> Iterator[_Candidate]:
    """As few changes of the number of experts as parameters allow."""
    plain = task.start.text.num_experts
    for tier, other_number in enumerate(task.tiers):
        for fields in task.experts({}, other_number):
            held = fields.get("concept_num_experts", plain)
            yield _Candidate(fields, abs(held - plain) / plain, tier)


def _by_loops(task: Task) -> Iterator[_Candidate]:
    """About half of what is saved goes into passes: 1.5 L at R = 2, 1.25 L at 1.5 (Figure 5)."""
    layers, plain = task.start.text.concept_layers, task.start.text.num_experts
    most = math.ceil(layers * (task.ratio - 1)) + 1
    numbers = range(1, most + 1, math.ceil(most / _MOST_LOOPS))
    for tier, other_number in enumerate(task.tiers):
        for extra in numbers if task.loops is None else [task.loops]:
            away = abs(1 + extra / layers - (1 + task.ratio) / 2)
            for fields in task.experts({"concept_loops": loop_spans(layers, extra)}, other_number):
                held = fields.get("concept_num_experts", plain)
                yield _Candidate(fields, away + abs(held - plain) / plain, tier)


def _by_width(task: Task) -> Iterator[_Candidate]:
    """About sqrt(R) as wide, in multiples as large as a match allows."""
    text, name = task.start.text, "concept_hidden_size"
    wanted = math.sqrt(task.ratio) * text.hidden_size
    one = {"concept_num_experts_per_tok": 1}  # no parameters depend on it
    if task.width is not None:
        fields = {name: task.width, **one}
        for held in task.near(fields, "concept_num_experts", 1, 2 * text.num_experts):
            for found in task.chosen({**fields, "concept_num_experts": held}, 1):
                yield _Candidate(found, 0.0)
        return
    fewest = max(int(text.num_experts / (2 * task.ratio)), 1)
    for tier, step in enumerate(_WIDTH_MULTIPLES):
        low = (text.hidden_size // step + 1) * step
        high = max(math.ceil(2 * task.ratio * text.hidden_size / step) * step, low + step)
        for held in range(fewest, text.num_experts + 1):
            # Experts that eight devices can share, unless the width is 5 % nearer without.
            uneven = 0.05 if held % 8 and text.num_experts % 8 == 0 else 0.0
            fields = {"concept_num_experts": held, **one}
            for width in task.near(fields, name, low, high, step):
                away = uneven + abs(math.log(width / wanted))
                for found in task.chosen({**fields, name: width}, 1):
                    yield _Candidate(found, away, tier)


_SEARCHES = {"experts": _by_experts, "loops": _by_loops, "width": _by_width}


def best(task: Task, strategy: str) -> tuple[ConceptMoEVLConfig, Match]:
    """The match nearest to the paper's way, or the configuration that misses least."""
    found: list[tuple[tuple[float, ...], ConceptMoEVLConfig, Match]] = []
    for candidate in _SEARCHES[strategy](task):
        if candidate.tier and any(entry[0][0] < candidate.tier for entry in found):
            break
        config = task.with_fields(candidate.fields)
        match = task.match(config)
        tier = candidate.tier if match.is_matched else math.inf
        # Among misses a tenth of a limit is worth less than a smaller change.
        order = (tier, 0.0 if match.is_matched else round(match.worst, 1), candidate.away)
        found.append(((*order, match.worst), config, match))
    if not found:
        raise UserError(f"strategy {strategy} has no configuration for this baseline")
    _, config, match = min(found, key=lambda entry: entry[0])
    return config, match
