"""What is drawn: the charts of every section, and the fields of metrics.jsonl that they show."""

from __future__ import annotations

import dataclasses

from .runs import Run

LOSSES = "Losses"  # whose axes can be switched
_STAGES = ("encoder", "concept", "decoder")
GIB = 2.0**30
_MODALITIES = ("image", "text")


@dataclasses.dataclass(frozen=True)
class Curve:
    """A field of a chart: `path` as in `Run.series`, drawn in units of `unit`; a target is drawn
    beside it, dashed.
    """

    label: str
    path: str
    target: str = ""
    smooth: bool = True
    dots: bool = False
    unit: float = 1.0


@dataclasses.dataclass(frozen=True)
class Subject:
    """One chart: title, its fields, and a note."""

    title: str
    curves: list[Curve]
    note: str = ""


def subjects_of(runs: list[Run]) -> dict[str, list[Subject]]:
    """Charts by section; those without values in any run are left out when drawn."""
    return {
        LOSSES: _losses(_names(runs, "lm_loss_by_source")),
        "Compression": _compression(_names(runs, "ratio_by_target")),
        "Experts": _experts(),
        "Schedules": _schedules(_names(runs, "lr_by_part")),
        "Speed": _speed(),
    }


def _names(runs: list[Run], field: str) -> list[str]:
    """Keys that a field has in any run."""
    return sorted({key for run in runs for key in run.keys(field)})


def _losses(sources: list[str]) -> list[Subject]:
    held_out = Curve("held-out", "held_out/lm_loss", smooth=False, dots=True)
    return [
        Subject("Language loss", [Curve("training", "lm_loss"), held_out]),
        Subject("Total loss", [Curve("loss", "loss")]),
        Subject("Language loss by modality", [Curve(m, f"lm_loss_{m}") for m in _MODALITIES]),
        Subject("Language loss by source", [Curve(s, f"lm_loss_by_source/{s}") for s in sources]),
        Subject(
            "Ratio loss",
            [Curve("ratio loss", "ratio_loss")],
            "1 at its target; unweighted",
        ),
        Subject("Balance loss", [Curve("balance loss", "balance_loss")], "1 is balanced"),
        Subject("Norm of the gradient", [Curve("before clipping", "grad_norm")]),
    ]


def _compression(drawn: list[str]) -> list[Subject]:
    return [
        Subject("Tokens per concept", [Curve("all tokens", "ratio", "target_ratio")]),
        Subject(
            "Tokens per concept by modality",
            [Curve(m, f"ratio_{m}", f"target_ratio_{m}") for m in _MODALITIES],
        ),
        Subject(
            "Tokens per concept by drawn ratio",
            [Curve(f"R = {ratio}", f"ratio_by_target/{ratio}") for ratio in drawn],
        ),
        Subject(
            "Confidence of boundaries",
            [Curve(m, f"boundary_confidence_{m}") for m in _MODALITIES],
            "mean |p - 1/2| where no boundary is forced",
        ),
        Subject(
            "Documents without a boundary",
            [Curve(m, f"documents_without_boundary_{m}") for m in _MODALITIES],
            "share; forced ones do not count",
        ),
        Subject(
            "Documents where every token is one",
            [Curve(m, f"documents_all_boundary_{m}") for m in _MODALITIES],
            "share; forced ones do not count",
        ),
    ]


def _experts() -> list[Subject]:
    loads = [
        Subject(
            f"Load of {stage} experts",
            [Curve(kind, f"expert_load/{stage}/{kind}") for kind in ("max", "min")],
            "share of the fair load; 1 is balanced",
        )
        for stage in _STAGES
    ]
    entropy = Subject(
        "Entropy of the routers",
        [Curve(stage, f"router_entropy/{stage}") for stage in _STAGES],
        "of a token's choice; 1 is uniform",
    )
    return [*loads, entropy]


def _schedules(parts: list[str]) -> list[Subject]:
    return [
        Subject(
            "Learning rate",
            [
                Curve("rate", "lr", smooth=False),
                *(Curve(part, f"lr_by_part/{part}", smooth=False) for part in parts),
            ],
        ),
        Subject("Noise", [Curve("tau", "tau", smooth=False)]),
        Subject("Weight of the ratio loss", [Curve("lambda", "ratio_loss_weight", smooth=False)]),
        Subject("Threshold of p", [Curve("threshold", "boundary_threshold", smooth=False)]),
    ]


def _speed() -> list[Subject]:
    return [
        Subject("Tokens per second", [Curve("all ranks", "tokens_per_second")]),
        Subject("Concepts per second", [Curve("all ranks", "concepts_per_second")]),
        Subject("Pictures per second", [Curve("all ranks", "images_per_second")]),
        Subject(
            "Model FLOPs utilisation",
            [Curve("share", "model_flops_utilization")],
            "share of what the devices could do",
        ),
        Subject("Share of time spent waiting for data", [Curve("share", "data_wait_share")]),
        Subject(
            "Peak memory of rank 0, GiB",
            [Curve("memory", "peak_memory", smooth=False, unit=GIB)],
        ),
    ]
