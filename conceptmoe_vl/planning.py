"""The ConceptMoE configuration that costs what a plain MoE costs (section 3.5 of the paper).

At ratio R the concept model reads 1/R of the positions. What that saves is spent by one of three
strategies, in the order of Table 1:

| strategy | fields of `text` that change |
| --- | --- |
| experts | `concept_num_experts_per_tok` rises |
| loops | `concept_loops`, with a smaller rise of `concept_num_experts_per_tok` |
| width | `concept_hidden_size` rises, `concept_num_experts` falls so that parameters stay |

Matched means: total parameters within 0.5 % and FLOPs per token within 1 % of the baseline.
Attention maps are left out, and so is the head, which is the same in both and would hide a
difference in small models; chunking, dechunking and joint decoding are counted. Heads are the same
in E, C and D, so that a wider C costs in proportion to its width: under `width` a concept passes
more experts as well.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from conceptmoe_vl.configuration import ChunkConfig, ConceptMoEVLConfig
from conceptmoe_vl.errors import UserError
from conceptmoe_vl.plan_search import (
    Match,
    Task,
    best,
    changed,
    flops_per_token,
    total_parameters,
)

# What `auto` tries, best first: the paper's strategies from scratch and for conversion.
PURPOSES = {"scratch": ("width", "loops", "experts"), "conversion": ("loops", "experts")}
_CONCEPT_FIELDS: dict[str, Any] = {
    "concept_hidden_size": None,
    "concept_loops": [],
    "concept_num_experts": None,
    "concept_num_experts_per_tok": None,
}
# What a plan decides.
PLANNED_FIELDS = ("encoder_layers", "concept_layers", "decoder_layers", *_CONCEPT_FIELDS)
_JOINT_LAYERS = 4  # the paper's
_MOST_LOOPS = 10_000
_LARGEST_RATIO = 100  # the search grows with it: at 1e9 it took all memory


@dataclasses.dataclass(frozen=True)
class Plan:
    """A configuration beside its baseline.

    Attributes:
        strategy: experts, loops or width. purpose: scratch or conversion.
        baseline: the plain MoE. config: what the strategy makes of it; the nearest one where
            `match.is_matched` is false.
        reason: why this strategy, in a sentence.
    """

    strategy: str
    purpose: str
    ratio: float
    baseline: ConceptMoEVLConfig
    config: ConceptMoEVLConfig
    match: Match
    reason: str

    @property
    def changes(self) -> dict[str, tuple[Any, Any]]:
        """Fields that differ, as `text.NAME: (baseline's, planned)`."""
        found = {}
        for section in ("text", "chunk"):
            ours, theirs = getattr(self.config, section), getattr(self.baseline, section)
            for field in dataclasses.fields(ours):
                pair = getattr(theirs, field.name), getattr(ours, field.name)
                if pair[0] != pair[1]:
                    found[f"{section}.{field.name}"] = pair
        return found


def baseline_of(
    config: ConceptMoEVLConfig,
    encoder_layers: int | None = None,
    decoder_layers: int | None = None,
) -> ConceptMoEVLConfig:
    """The plain MoE with `config`'s layers: every token a concept, nothing spent on concepts.

    Args:
        encoder_layers, decoder_layers: another split of all layers; None keeps `config`'s.

    Raises:
        UserError: no layer is left for C, or a plain MoE whose concept layers differ from others.
    """
    text = config.text
    if config.chunk.router == "none":
        for name, plain in _CONCEPT_FIELDS.items():
            if getattr(text, name) != plain:
                raise UserError(
                    f"text.{name} is {getattr(text, name)} in a model without chunking; a baseline "
                    "has the same layers everywhere: leave the field out, the plan sets it"
                )
    layers = text.encoder_layers + text.concept_layers + text.decoder_layers
    encoder = text.encoder_layers if encoder_layers is None else encoder_layers
    decoder = text.decoder_layers if decoder_layers is None else decoder_layers
    if min(encoder, decoder) < 0 or encoder + decoder >= layers:
        raise UserError(
            f"of {layers} layers {encoder} are the encoder's and {decoder} the decoder's; leave at "
            "least one for the concept model (--encoder-layers, --decoder-layers)"
        )
    split = {
        "encoder_layers": encoder,
        "concept_layers": layers - encoder - decoder,
        "decoder_layers": decoder,
    }
    plain = changed(config, {**_CONCEPT_FIELDS, **split})
    plain.chunk = ChunkConfig(router="none", concept_residual="delta")
    return plain


def _started(
    baseline: ConceptMoEVLConfig, chunk: ChunkConfig, ratio: float, purpose: str, joint: int | None
) -> ConceptMoEVLConfig:
    """The baseline with chunking at `ratio`: settings of `chunk`, where it chunks, else ours."""
    decoder = baseline.text.decoder_layers
    if joint is None:
        joint = min(chunk.joint_decoding_layers or _JOINT_LAYERS, decoder)
    if not 0 <= joint <= decoder:
        raise UserError(
            f"--joint-layers is {joint}, but the decoder has {decoder} layers; give 0 to {decoder}"
        )
    fields: dict[str, Any] = {
        "target_ratio": ratio,
        "joint_decoding_layers": joint,
        # what speaks of other ratios
        **dict.fromkeys(("target_ratios", "image_target_ratio", "text_target_ratio")),
        "calibration": None,
    }
    if purpose == "conversion":  # exact at R = 1, and nearest to the original above it
        fields |= {"concept_residual": "delta", "merge": "boundary", "ema": False}
    start = copy.copy(baseline)
    start.chunk = dataclasses.replace(chunk if chunk.router != "none" else ChunkConfig(), **fields)
    return start


def plan(
    base: ConceptMoEVLConfig,
    ratio: float,
    strategy: str = "auto",
    purpose: str = "scratch",
    *,
    encoder_layers: int | None = None,
    decoder_layers: int | None = None,
    joint_layers: int | None = None,
    loops: int | None = None,
    width: int | None = None,
) -> Plan:
    """The configuration at `ratio` that is matched to the plain MoE with `base`'s layers.

    Args:
        base: the baseline; where it chunks, its plain MoE is the baseline and its settings of
            chunking are kept.
        ratio: R, tokens per concept. strategy: experts, loops, width or auto.
        purpose: scratch, or conversion: pretrained layers keep their parameters, so no width and
            no other number of experts.
        encoder_layers, decoder_layers: another split of `base`'s layers.
        joint_layers: layers of D with joint decoding (None: `base`'s, else the last four).
        loops: passes of concept layers beyond one each, strategy loops alone (None: searched).
        width: width of concepts, strategy width alone (None: searched).

    Returns:
        The plan; the nearest configuration where none is matched (`plan.match.is_matched`).

    Raises:
        UserError: a ratio of 1 or less, width for conversion, an option of another strategy, or a
            base that is no baseline.
    """
    _check_options(ratio, strategy, purpose, loops, width)
    baseline = baseline_of(base, encoder_layers, decoder_layers)
    if width is not None and (width <= baseline.text.hidden_size or width % 8):
        raise UserError(
            f"--width is {width}; give a multiple of 8 above text.hidden_size "
            f"{baseline.text.hidden_size}"
        )
    task = Task(
        baseline=baseline,
        start=_started(baseline, base.chunk, ratio, purpose, joint_layers),
        ratio=ratio,
        free=purpose == "scratch",
        loops=loops,
        width=width,
        parameters=total_parameters(baseline),
        flops=flops_per_token(baseline),
    )
    return _choose(task, PURPOSES[purpose] if strategy == "auto" else (strategy,), purpose)


def _check_options(
    ratio: float, strategy: str, purpose: str, loops: int | None, width: int | None
) -> None:
    if not 1 < ratio <= _LARGEST_RATIO:
        raise UserError(
            f"the ratio is {ratio:g}; give the tokens per concept, above 1, at most "
            f"{_LARGEST_RATIO}"
        )
    for name, value, choices in (
        ("purpose", purpose, list(PURPOSES)),
        ("strategy", strategy, ["auto", *PURPOSES["scratch"]]),
    ):
        if value not in choices:
            raise UserError(f"the {name} is {value!r}; choose one of {choices}")
    if strategy != "auto" and strategy not in PURPOSES[purpose]:
        raise UserError(
            f"strategy {strategy} changes the shapes of pretrained layers; for conversion choose "
            "experts or loops"
        )
    for own, given in (("loops", loops), ("width", width)):
        if given is not None and strategy != own:
            raise UserError(f"--{own} belongs to strategy {own}; give --strategy {own} with it")
    if loops is not None and not 1 <= loops <= _MOST_LOOPS:
        raise UserError(
            f"--loops is {loops}; give the extra passes of concept layers, 1 to {_MOST_LOOPS}"
        )


def _choose(task: Task, strategies: tuple[str, ...], purpose: str) -> Plan:
    """The first strategy with a match, else the one that misses least."""
    plans: list[Plan] = []
    for strategy in strategies:
        config, match = best(task, strategy)
        reason = _reason(strategy, purpose, [p.strategy for p in plans])
        plans.append(Plan(strategy, purpose, task.ratio, task.baseline, config, match, reason))
        if match.is_matched:
            return plans[-1]
    return min(plans, key=lambda found: found.match.worst)


_REASONS = {
    ("width", "scratch"): "from scratch the paper widens the concept model and gains at every size",
    ("loops", "scratch"): "loops with a few more experts keep every width and step finely",
    ("experts", "scratch"): "more experts a concept change no shape and are the fastest in use",
    ("loops", "conversion"): "pretrained layers keep their shapes, which rules out width; loops "
    "with a few more experts gained most in the paper's conversion (top11-loop8 46.4, top15 41.3, "
    "MoE 40.9)",
    ("experts", "conversion"): "pretrained layers keep their shapes, which rules out width; more "
    "experts a concept are the fastest in use (Figure 5)",
}


def _reason(strategy: str, purpose: str, failed: list[str]) -> str:
    tried = f"; {' and '.join(failed)} missed the limits" if failed else ""
    return _REASONS[strategy, purpose] + tried
