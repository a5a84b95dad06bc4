"""Pictures with their concepts outlined and coloured, and prompts with their chunks shaded."""

from __future__ import annotations

import base64
import colorsys
import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from PIL import Image, ImageDraw

from conceptmoe_vl.chunk_trace import IMAGE, MODALITIES, ChunkTrace, trace_conversation
from conceptmoe_vl.images import decode_image
from conceptmoe_vl.requests import with_images

_PATCH_PIXELS = 20  # of a drawn patch at least, so that an outline does not cover it
_SHORTEST_SIDE, _LONGEST_SIDE = 320, 1600  # of a drawing, whatever its patches
_TINT = 0.38  # how much of a region's colour is laid over the picture
_GOLDEN = 0.381966  # of a turn of the hue: neighbours in number are far apart in colour
_SHADES = 8  # colours of chunks in text


def colour_of(number: int) -> tuple[int, int, int]:
    """RGB of a region; those of neighbouring numbers are easily told apart."""
    hue = number * _GOLDEN % 1.0
    value = (0.95, 0.75)[number // 3 % 2]
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.75, value)
    return round(255 * red), round(255 * green), round(255 * blue)


def draw_regions(picture: Image.Image, region_RC: np.ndarray) -> Image.Image:
    """The picture with every region of its patches tinted and outlined.

    Args:
        picture: RGB, as decoded. region_RC: `[rows, columns]` number of each patch's region;
            negative ones (patches that no concept holds) are left grey.

    Returns:
        RGB, at least 20 pixels a patch and 320 a side, as far as no side is longer than 1,600.
    """
    rows, columns = region_RC.shape
    factor = max(
        _PATCH_PIXELS * columns / picture.width,
        _PATCH_PIXELS * rows / picture.height,
        _SHORTEST_SIDE / min(picture.size),
        1,
    )
    factor = min(factor, _LONGEST_SIDE / max(picture.size))
    width, height = (max(round(side * factor), 1) for side in picture.size)
    base = picture.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
    # The patch that each pixel lies in: the grid covers the whole picture, whatever its shape.
    row_H = np.minimum(np.arange(height) * rows // height, rows - 1)
    column_W = np.minimum(np.arange(width) * columns // width, columns - 1)
    region_HW = region_RC[np.ix_(row_H, column_W)]
    colours = np.array(
        [(128, 128, 128), *(colour_of(number) for number in range(max(region_RC.max() + 1, 0)))],
        np.float32,
    )
    tinted = np.asarray(base, np.float32) * (1 - _TINT)
    tinted += colours[np.maximum(region_HW, -1) + 1] * _TINT
    drawn = Image.fromarray(np.clip(tinted, 0, 255).astype(np.uint8))
    _outline(ImageDraw.Draw(drawn), region_RC, width, height)
    return drawn


def _outline(draw: ImageDraw.ImageDraw, region_RC: np.ndarray, width: int, height: int) -> None:
    """Lines where neighbouring patches belong to different regions, dark on light."""
    rows, columns = region_RC.shape
    x = [round(column * width / columns) for column in range(columns + 1)]
    y = [round(row * height / rows) for row in range(rows + 1)]
    beside = np.argwhere(region_RC[:, 1:] != region_RC[:, :-1]).tolist()
    below = np.argwhere(region_RC[1:] != region_RC[:-1]).tolist()
    lines = [(x[column + 1], y[row], x[column + 1], y[row + 1]) for row, column in beside]
    lines += [(x[column], y[row + 1], x[column + 1], y[row + 1]) for row, column in below]
    for thickness, colour in ((4, (255, 255, 255)), (2, (20, 20, 20))):
        for line in lines:
            draw.line(line, fill=colour, width=thickness)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A token on the page.

    Attributes:
        text: what it stands for. shade: number of its chunk's colour; -1 for an open chunk.
        probability: p. is_boundary: closes its chunk; is_forced: because it must.
    """

    text: str
    shade: int
    probability: float
    is_boundary: bool
    is_forced: bool


def pieces_of(trace: ChunkTrace, tokenizer: Any) -> list[Piece]:
    """A prompt's tokens with the shade of their chunk; the patches of a plane are one piece."""
    planes = {plane.first: plane for plane in trace.planes}
    pieces, place = [], 0
    while place < len(trace.ids):
        plane = planes.get(place)
        if plane is not None:
            inside = trace.is_boundary[plane.tokens]
            text = f"[{plane.rows} × {plane.columns} patches, {int(inside.sum())} concepts]"
            pieces.append(Piece(text, -2, 1.0, False, False))
            place = plane.tokens.stop
            continue
        concept = int(trace.concept[place])
        pieces.append(
            Piece(
                _text_of(tokenizer, int(trace.ids[place])),
                concept % _SHADES if concept >= 0 else -1,
                float(trace.probability[place]),
                bool(trace.is_boundary[place]),
                bool(trace.is_forced[place]),
            )
        )
        place += 1
    return pieces


def _text_of(tokenizer: Any, token: int) -> str:
    """A token's text, with what cannot be seen made visible; parts of characters as stored."""
    text = tokenizer.decode([token])
    if "�" in text or not text:
        text = str(tokenizer.convert_ids_to_tokens(token))
    return text.replace("\n", "⏎\n").replace("\t", "⇥")


def data_uri(picture: Image.Image) -> str:
    """A picture as a `data:` address, PNG."""
    stream = io.BytesIO()
    picture.save(stream, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode("ascii")


@dataclasses.dataclass(frozen=True)
class Drawing:
    """One picture of a prompt in one image mode.

    Attributes:
        title: the mode and its ratio. picture: with regions.
    """

    title: str
    picture: Image.Image

    @property
    def uri(self) -> str:
        return data_uri(self.picture)


@dataclasses.dataclass(frozen=True)
class ShownPrompt:
    """A prompt on a page.

    Attributes:
        name: heading. drawings: for each image the picture itself and its drawings. pieces: tokens.
        facts: (what, value), beside the heading.
    """

    name: str
    drawings: Sequence[Sequence[Drawing]]
    pieces: Sequence[Piece]
    facts: Sequence[tuple[str, str]]


def show_prompt(
    model: Any,
    processor: Any,
    messages: list[dict],
    name: str,
    compression: float | None = None,
    trace: ChunkTrace | None = None,
) -> ShownPrompt:
    """A prompt's chunks: pictures in both image modes side by side, text as the model cuts it.

    Args:
        trace: of the prompt in the model's own image mode; None: it is traced here.

    Raises:
        UserError: as `trace_conversation`.
    """
    own = model.config.chunk.image_mode
    trace = trace or trace_conversation(model, processor, messages, compression)
    traces = {own: trace}
    pictures = [
        decode_image(part["image"], processor.image_processor.background)
        for message in with_images(messages)
        if not isinstance(message["content"], str)
        for part in message["content"]
        if part["type"] == "image"
    ]
    if pictures:
        other = "sequential" if own == "grid" else "grid"
        traces[other] = trace_conversation(model, processor, messages, compression, other)
    drawings = [
        [Drawing(f"{picture.width} × {picture.height} pixels", picture)]
        + [
            drawing
            for mode in ("sequential", "grid")
            for drawing in _drawings(picture, traces[mode], number, mode, mode == own)
        ]
        for number, picture in enumerate(pictures)
    ]
    facts = [("tokens", f"{len(trace.ids):,}"), ("concepts", f"{trace.concepts:,}")]
    for modality in (None, *MODALITIES):
        ratio = trace.ratio(modality)
        if ratio is not None and (modality != IMAGE or pictures):
            facts.append((f"R {modality or 'all'}", f"{ratio:.2f}"))
    return ShownPrompt(name, drawings, pieces_of(trace, processor.tokenizer), facts)


def _drawings(
    picture: Image.Image, trace: ChunkTrace, number: int, mode: str, is_own: bool
) -> list[Drawing]:
    """One for each plane of an image; the thumbnail of an image in tiles stands first."""
    planes = trace.images()[number]
    names = ("thumbnail", "tiles") if len(planes) > 1 else ("",)
    found = []
    for plane, part in zip(planes, names, strict=True):
        region_RC = trace.regions(plane)
        concepts = int(trace.is_boundary[plane.tokens].sum())
        ratio = f"{region_RC.size / concepts:.2f}" if concepts else "no boundary"
        title = ", ".join(filter(None, (mode, part, f"R {ratio}")))
        title += "" if is_own else " (not trained for)"
        first = region_RC[region_RC >= 0].min(initial=np.iinfo(region_RC.dtype).max)
        shown = np.where(region_RC >= 0, region_RC - first, -1)
        found.append(Drawing(title, draw_regions(picture, shown)))
    return found


def side_by_side(drawings: Sequence[Drawing], height: int = 512) -> Image.Image:
    """Drawings of one image in a row on white, with their titles, as one picture for a file."""
    scaled = [
        d.picture.convert("RGB").resize(
            (max(round(d.picture.width * height / d.picture.height), 1), height),
            Image.Resampling.LANCZOS,
        )
        for d in drawings
    ]
    gap, head = 12, 28
    width = sum(picture.width for picture in scaled) + gap * (len(scaled) + 1)
    sheet = Image.new("RGB", (width, height + head + gap), "white")
    draw, left = ImageDraw.Draw(sheet), gap
    for drawing, picture in zip(drawings, scaled, strict=True):
        draw.text((left, 8), drawing.title, fill=(30, 30, 30), font_size=14)
        sheet.paste(picture, (left, head))
        left += picture.width + gap
    return sheet


def page_environment(*folders: Path) -> jinja2.Environment:
    """Templates of these folders and of this package; all that is put into them is escaped."""
    loader = jinja2.FileSystemLoader([*folders, Path(__file__).with_name("templates")])
    return jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)


def page_of(model: str, prompts: Sequence[ShownPrompt]) -> str:
    """One page of prompts."""
    return page_environment().get_template("chunks.html").render(model=model, prompts=prompts)
