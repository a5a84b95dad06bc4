"""`inspect --html`: one page that shows samples as the model gets them.

Notable:
- the page is one file without scripts: pictures are inlined, styles stand in it, and a content
  policy in its head forbids the browser to fetch or run anything;
- everything from the records goes through Jinja's escaping, with control characters made visible.
"""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2
from PIL import Image

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.files import written_whole
from conceptmoe_vl.images import ImageError
from conceptmoe_vl.prompts import Picture
from data_pipelines.pieces import Piece, encode_whole, token_pieces
from data_pipelines.records import RecordError
from data_pipelines.shards import IndexedSample, ShardReader, index_shards
from data_pipelines.visible import visible

_THUMBNAIL = 256  # pixels, of the longer side
_OPEN_TOKENS = 1500  # a sample of more tokens shows them when asked


@dataclasses.dataclass(frozen=True)
class Thumbnail:
    """A picture of a sample.

    Fields:
        uri: its thumbnail as a `data:` address.
        width, height: of the whole picture, in pixels.
        planes: rows and columns of its tokens, `8 x 8`; two of a picture that is cut into tiles.
    """

    uri: str
    width: int
    height: int
    planes: str


@dataclasses.dataclass(frozen=True)
class Shown:
    """A sample on the page.

    Fields:
        turns: role and parts, each a text or a Thumbnail; empty where the sample is damaged.
        pieces: its tokens.
        supervised: tokens that the loss counts.
        reason, fault: what is wrong with it; None: nothing.
    """

    name: str
    source: str = ""
    turns: Sequence[tuple[str, list[str | Thumbnail]]] = ()
    pieces: Sequence[Piece] = ()
    supervised: int = 0
    reason: str | None = None
    fault: str = ""

    @property
    def tokens(self) -> int:
        return sum(len(piece.ids) for piece in self.pieces)

    @property
    def images(self) -> int:
        return sum(isinstance(part, Thumbnail) for _, parts in self.turns for part in parts)

    @property
    def folded(self) -> bool:
        """Whether the tokens are shown only when asked for."""
        return self.tokens > _OPEN_TOKENS


def write_page(patterns: list[str], limit: int, processor: Any, path: Path, tokenizer: str) -> int:
    """Writes the page of the first samples, whole or not at all.

    Args:
        limit: samples on the page at most.
        processor: a ConceptMoEVLProcessor.
        tokenizer: what its tokenizer is, for the page's head.

    Returns:
        How many samples of the page, and shards, are damaged.

    Raises:
        UserError: no shard, or `path` cannot be written.
    """
    index = index_shards(patterns)
    reader = ShardReader()
    samples = [show_sample(reader, indexed, processor) for indexed in index.samples[:limit]]
    reader.close()
    damaged = [sample for sample in samples if sample.reason is not None]
    page = _template().render(
        samples=samples,
        damaged=damaged,
        damaged_shards=index.damaged,
        total=len(index.samples),
        shards=len(index.shards),
        tokens=sum(sample.tokens for sample in samples),
        supervised=sum(sample.supervised for sample in samples),
        images=sum(sample.images for sample in samples),
        tokenizer=tokenizer,
    )
    try:
        with written_whole(path) as beside:
            beside.write_text(page, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(f"--html: '{path}' cannot be written ({error}); name a file") from error
    return len(damaged) + len(index.damaged)


def show_sample(reader: ShardReader, indexed: IndexedSample, processor: Any) -> Shown:
    """A sample as it stands on the page; one that training cannot use, with its reason."""
    try:
        conversation, sample = encode_whole(reader, indexed, processor)
    except (RecordError, ImageError) as error:
        return Shown(indexed.name, reason=error.reason, fault=str(error))
    images = iter(sample.images)
    turns = [
        (
            turn.role,
            [
                _thumbnail(part.image, next(images).planes) if isinstance(part, Picture) else part
                for part in turn.parts
            ],
        )
        for turn in conversation.turns
    ]
    pieces = list(token_pieces(processor, sample.input_ids, sample.labels))
    return Shown(indexed.name, conversation.source, turns, pieces, sample.num_supervised)


def _thumbnail(image: Image.Image, planes: Iterable[tuple[int, int]]) -> Thumbnail:
    """Small pictures keep their pixels (PNG), larger ones are reduced (JPEG)."""
    small = image.copy()
    small.thumbnail((_THUMBNAIL, _THUMBNAIL))
    kind = "PNG" if small.size == image.size else "JPEG"
    buffer = io.BytesIO()
    small.save(buffer, kind, quality=85)
    data = base64.b64encode(buffer.getvalue()).decode()
    grids = ", ".join(f"{rows} \N{MULTIPLICATION SIGN} {columns}" for rows, columns in planes)
    uri = f"data:image/{kind.lower()};base64,{data}"
    return Thumbnail(uri, image.width, image.height, grids)


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("data_pipelines"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["visible"] = visible
    environment.filters["marked"] = lambda text: visible(text).replace("\n", "\N{RETURN SYMBOL}\n")
    environment.tests["thumbnail"] = lambda part: isinstance(part, Thumbnail)
    return environment.get_template("inspect.html")
