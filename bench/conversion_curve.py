"""The curve of `bench.conversion_training`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conceptmoe_vl.training.run_files import read_lines

_LONG, _CONTROL, _RATIO = "long", "long-source", "1.5"


def draw(out: Path, figures: dict[str, Any], path: Path) -> None:
    """Held-out log-perplexity along the long run and its control, with the run's ratio below.

    Args:
        out: folder of the runs. figures: `untrained` and `long`, see `bench.conversion_training`.
        path: where the PNG goes.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display is needed to write a file
    from matplotlib import pyplot

    figure, (losses, ratios) = pyplot.subplots(
        2, 1, figsize=(7, 5.5), sharex=True, height_ratios=[3, 1], layout="constrained"
    )
    start = figures["untrained"]["delta, boundary"]
    source, untrained = start["1.0"][1], start[_RATIO][1]
    for name, colour, label in (
        (_LONG, "tab:blue", "trained, at its ratio of the moment"),
        (_CONTROL, "tab:green", "the source, trained on the same tokens"),
    ):
        train = read_lines(out / "runs" / name / "metrics.jsonl")
        if not train:  # a control that was left out
            continue
        tokens = {line["step"]: line["tokens"] / 1000 for line in train}
        held_out = read_lines(out / "runs" / name / "evaluation.jsonl")
        x = [0.0, *(tokens[line["step"]] for line in held_out)]
        losses.plot(
            x, [source, *(line["lm_loss"] for line in held_out)], ".-", c=colour, label=label
        )
        if name == _LONG:
            ratios.plot(list(tokens.values()), [line["ratio"] for line in train], c=colour)
            targets = [line["target_ratio"] for line in train]
            ratios.plot(list(tokens.values()), targets, "--", c="grey", lw=1)
            end = figures[_LONG]["log_perplexity"][_RATIO][1]
            losses.plot(x[-1], end, "o", c=colour, label=f"the same at exactly R = {_RATIO}")
    half = (source + untrained) / 2
    for level, style, label in (
        (untrained, "-", f"untrained, R = {_RATIO}"),
        (half, ":", "half of the loss won back"),
        (source, "-", "the source, untrained"),
    ):
        losses.axhline(level, c="grey", ls=style, lw=1)
        losses.annotate(label, (0, level), (0, 3), textcoords="offset points", fontsize=8)
    losses.set_ylabel("held-out log-perplexity")
    losses.legend(fontsize=8)
    ratios.set_ylabel("tokens per concept")
    ratios.set_xlabel("thousand tokens of training")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
