"""RefCOCO, RefCOCO+ and RefCOCOg (Yu et al. 2016): the box of what an expression describes.

Layouts, the first that is found is read:

1. `<set>/data/<split>-*.parquet` with `bbox` [x, y, width, height] and expressions in `answer`, as
   exported for other harnesses;
2. `finetune_<set>_<split>.json`, COCO's format with one image an expression, as MDETR published it;
3. `<set>/refs(unc).p` with `<set>/instances.json`, as first published. The pickle is read by an
   unpickler that makes plain containers alone and refuses any that names a class or function.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image, UnidentifiedImageError

from conceptmoe_vl.asking import question_messages
from conceptmoe_vl.errors import UserError
from eval.metrics import intersection_over_union, parse_box
from eval.metrics.boxes import ACCEPTED_OVERLAP, Box, scaled_box
from eval.tasks import Question, RatioOfSums, Scored, Task
from eval.tasks._files import (
    Images,
    checked,
    complete,
    find_files,
    read_json,
    take,
    take_id,
    take_texts,
)
from eval.tasks._tables import parquet_rows

_INSTRUCTION = (
    "Give the bounding box of the region that this sentence describes, as [left, top, right, "
    "bottom] with numbers between 0 and 1: "
)
_TRAIN2014 = (
    *("train2014", "images/train2014", "images/mscoco/images/train2014", "coco/train2014"),
    *("images", "."),
)
_SPLITTERS = {"refcoco": "unc", "refcoco+": "unc", "refcocog": "umd"}


class Expression(NamedTuple):
    """An expression and its box in pixels, [left, top, width, height]."""

    key: str
    text: str
    picture: Callable[[], bytes]
    box: list[float]
    width: int
    height: int


def load(folder: Path, data_set: str, split: str) -> list[Question]:
    splitter = _SPLITTERS[data_set]
    layouts: list[tuple[list[str], Callable[..., Iterator[Expression]]]] = [
        ([f"{data_set}/data/{split}-*.parquet", f"{data_set}/{split}-*.parquet"], _from_parquet),
        (
            [
                f"{root}finetune_{data_set}_{split}.json"
                for root in ("", "mdetr_annotations/", "annotations/", "OpenSource/")
            ],
            _from_mdetr,
        ),
        ([f"{data_set}/refs({splitter}).p"], partial(_from_pickle, split=split)),
    ]
    for places, read in layouts:
        if files := find_files(folder, places):
            questions = (_question(expression) for expression in read(folder, files))
            return complete(f"{data_set}_{split}", questions, files)
    tried = ", ".join(f"'{place}'" for places, _ in layouts for place in places)
    raise UserError(f"'{folder}' holds no split '{split}' of {data_set}: expected one of {tried}")


def _from_parquet(folder: Path, files: Sequence[Path]) -> Iterator[Expression]:
    for row in parquet_rows(files, ("question_id", "answer", "bbox", "image"), ("image",)):
        picture = row.image()
        width, height = _size(picture(), row.where)
        key = take_id(row.fields, "question_id", row.where)
        for number, text in enumerate(take_texts(row.fields, "answer", row.where)):
            box = _box(row.fields, row.where)
            yield Expression(f"{key}/{number}", text, picture, box, width, height)


def _from_mdetr(folder: Path, files: Sequence[Path]) -> Iterator[Expression]:
    file = files[0]
    content = read_json(file)
    images = Images(folder, _TRAIN2014)
    boxes = {
        take_id(record, "image_id", f"annotation {number} of '{file}'"): record
        for number, record in enumerate(take(content, "annotations", list, f"'{file}'"))
    }
    for number, record in enumerate(take(content, "images", list, f"'{file}'")):
        where = f"image {number} of '{file}'"
        key = take_id(record, "id", where)
        if key not in boxes:
            raise UserError(f"{where} has no annotation; download the file again")
        yield Expression(
            key,
            take(record, "caption", str, where),
            images.lazy(take(record, "file_name", str, where), where),
            _box(boxes[key], where),
            take(record, "width", int, where),
            take(record, "height", int, where),
        )


def _from_pickle(folder: Path, files: Sequence[Path], split: str) -> Iterator[Expression]:
    file = files[0]
    instances = file.with_name("instances.json")
    content = read_json(instances)
    images = Images(folder, _TRAIN2014)
    records = {
        name: {
            take_id(record, "id", f"{name} {number} of '{instances}'"): record
            for number, record in enumerate(take(content, name, list, f"'{instances}'"))
        }
        for name in ("images", "annotations")
    }
    for number, reference in enumerate(checked(plain_pickle(file), list, f"'{file}'")):
        where = f"reference {number} of '{file}'"
        if take(reference, "split", str, where) != split:
            continue
        image = records["images"].get(take_id(reference, "image_id", where))
        annotation = records["annotations"].get(take_id(reference, "ann_id", where))
        if image is None or annotation is None:
            raise UserError(f"{where} has no image or annotation in '{instances}'")
        size = [take(image, name, int, where) for name in ("width", "height")]
        lazy = images.lazy(take(image, "file_name", str, where), where)
        for sentence in take(reference, "sentences", list, where):
            key = take_id(sentence, "sent_id", where)
            text = take(sentence, "sent", str, where)
            yield Expression(key, text, lazy, _box(annotation, where), *size)


class _PlainUnpickler(pickle.Unpickler):
    """Makes lists, mappings, texts and numbers: nothing that a class or function has to make."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it wants to run {module_name}.{global_name}")


def plain_pickle(file: Path) -> Any:
    """The content of a pickle of plain containers.

    Raises:
        UserError: it is damaged, or wants to call something.
    """
    try:
        with open(file, "rb") as stream:
            return _PlainUnpickler(stream, encoding="utf-8").load()
    # What a damaged pickle raises is whatever its bytes happen to ask for.
    except (
        *(OSError, pickle.UnpicklingError, EOFError, ValueError, TypeError, IndexError, KeyError),
        *(AttributeError, OverflowError, MemoryError, RecursionError),
    ) as error:
        raise UserError(f"'{file}' is no plain pickle ({error}); download it again") from error


def _box(record: Any, where: str) -> list[float]:
    box = take(record, "bbox", list, where)
    if len(box) != 4 or not all(isinstance(value, (int, float)) for value in box):
        raise UserError(f"'bbox' of {where} is {box!r}, not [left, top, width, height]")
    return [float(value) for value in box]


def _size(data: bytes, where: str) -> tuple[int, int]:
    try:
        with Image.open(io.BytesIO(data)) as image:
            return image.size
    except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"the picture of {where} cannot be read ({error})") from error


def _question(expression: Expression) -> Question:
    left, top, width, height = expression.box
    corners = [left, top, left + width, top + height]
    box = scaled_box(corners, "pixels", expression.width, expression.height)
    return Question(
        key=expression.key,
        messages=question_messages([expression.picture], f"{_INSTRUCTION}{expression.text}"),
        references=(_written(box),),
        details={"box": list(box)},
    )


def _written(box: Box) -> str:
    return "[" + ", ".join(f"{value:.4f}" for value in box) + "]"


def _parse(text: str, question: Question) -> str:
    box = parse_box(text, "unit")
    return "" if box is None else repr(list(box))


def _overlap(parsed: str, question: Question) -> float:
    box = parse_box(parsed, "unit")
    if box is None:
        return 0.0
    return intersection_over_union(box, Box(*question.details["box"]))


def _score(parsed: str, question: Question) -> float:
    return float(_overlap(parsed, question) >= ACCEPTED_OVERLAP)


def _figures(sample: Scored) -> dict[str, tuple[float, float]]:
    return {
        "accuracy_at_0.5": (sample.score, 1.0),
        "mean_iou": (_overlap(sample.parsed, sample.question), 1.0),
        "unreadable": (float(sample.parsed == ""), 1.0),
    }


_SIZES = {
    "refcoco": {"val": 10834, "testA": 5657, "testB": 5095},
    "refcoco+": {"val": 10758, "testA": 5726, "testB": 4889},
    "refcocog": {"val": 4896, "test": 9602},
}
TASKS = [
    Task(
        name=f"{data_set}_{split}",
        description=f"{data_set} {split}: boxes that overlap by half or more",
        default_data="data/refcoco",
        load=partial(load, data_set=data_set, split=split),
        parse=_parse,
        score=_score,
        max_new_tokens=48,
        metrics=RatioOfSums(_figures),
        official_size=size,
    )
    for data_set, splits in _SIZES.items()
    for split, size in splits.items()
]
