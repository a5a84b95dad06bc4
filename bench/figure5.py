"""The paper's Figure 5 beside the same bars measured here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Speed-ups over the FLOPs-matched MoE in percent (A10B-300B, Hopper GPUs; arXiv 2601.21420,
# Figure 5); lengths in units of 1,024 tokens. Decoding has batch 256.
PAPER_LENGTHS = {
    "prefill": [4, 8, 16, 32, 64, 128, 256, 512, 1024],
    "decode": [4, 8, 16, 32, 64],
}
PAPER = {
    "prefill": {
        "2L-top8-R2": [-5.1, -2.9, 0.4, 6.7, 17.2, 31.6, 46.8, 59.6, 68.7],
        "1.5L-top13-R2": [7.8, 10.4, 14.4, 22.3, 36.0, 55.3, 76.8, 95.4, 109.0],
        "1L-top24-R2": [24.7, 27.6, 32.7, 42.3, 61.1, 88.7, 121.6, 152.1, 175.1],
        "1L-top16-R1.5": [18.4, 19.1, 20.7, 22.9, 26.6, 31.4, 36.4, 40.5, 43.6],
        "1.25L-top11-R1.5": [5.2, 7.4, 9.2, 10.4, 12.1, 14.1, 16.2, 18.0, 19.4],
    },
    "decode": {
        "2L-top8-R2": [-14.3, -10.9, -2.9, 13.5, 38.3],
        "1.5L-top13-R2": [3.1, 7.3, 16.9, 37.4, 72.5],
        "1L-top24-R2": [32.1, 37.5, 50.6, 77.3, 117.1],
        "1L-top16-R1.5": [21.7, 25.2, 34.1, 55.2, 77.5],
        "1.25L-top11-R1.5": [5.7, 8.9, 16.1, 34.1, 53.3],
    },
}


def label(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def draw(cells: list[dict[str, Any]], machine: str, path: Path) -> None:
    """Writes the figure: a row of panels a kind and batch, measured on the left, the paper's right.

    Args:
        cells: results of `bench.inference` with what, model, batch, length, speedup, predicted.
        machine: a line for the title. path: where the PNG goes.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display is needed to write a file
    from matplotlib import pyplot

    rows = sorted({(c["what"] == "decode", c["batch"]) for c in cells})
    if not rows:
        return
    figure, panels = pyplot.subplots(
        len(rows), 2, figsize=(13, 3.6 * len(rows)), squeeze=False, layout="constrained"
    )
    for (is_decode, batch), (left, right) in zip(rows, panels, strict=True):
        what = "decode" if is_decode else "prefill"
        own = [c for c in cells if c["what"] == what and c["batch"] == batch]
        lengths = sorted({c["length"] for c in own})
        found = {(c["model"], c["length"]): c for c in own}
        names = [name for name in PAPER[what] if any(c["model"] == name for c in own)]
        for index, name in enumerate(names):
            mine = [found.get((name, length)) for length in lengths]
            percent = [100 * (c["speedup"] - 1) if c else 0.0 for c in mine]
            places = _bars(left, index, len(names), percent, name)
            predicted = [100 * (c["predicted"] - 1) if c else 0.0 for c in mine]
            left.scatter(places, predicted, marker="_", color="black", zorder=3, linewidths=1)
        _finish(left, [label(n) for n in lengths], f"{what}, batch {batch}: {machine}")
        for index, (name, percent) in enumerate(PAPER[what].items()):
            _bars(right, index, len(PAPER[what]), percent, name)
        kind = "decode, batch 256" if is_decode else "prefill"
        title = f"{kind}: the paper, A10B-300B on Hopper GPUs"
        _finish(right, [f"{n}K" for n in PAPER_LENGTHS[what]], title)
    panels[0, 0].legend(fontsize=8, title="black mark: predicted", title_fontsize=8)
    beside = path.with_name(f".{path.name}.tmp")
    figure.savefig(beside, dpi=130, format="png")
    beside.replace(path)
    pyplot.close(figure)


def _bars(panel: Any, index: int, count: int, percent: list[float], name: str) -> list[float]:
    width = 0.8 / count
    places = [group + (index - (count - 1) / 2) * width for group in range(len(percent))]
    panel.bar(places, percent, width, label=name, color=f"C{list(PAPER['prefill']).index(name)}")
    return places


def _finish(panel: Any, lengths: list[str], title: str) -> None:
    panel.set_xticks(range(len(lengths)), lengths)
    panel.set_ylabel("faster than the matched MoE, %")
    panel.set_title(title, fontsize=9)
    panel.axhline(0, color="black", linewidth=0.6)
    panel.grid(axis="y", alpha=0.3)
