"""Writes small shards in the project's format."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

from PIL import Image


def png(colour: str = "red", size: int = 32) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (size, size), colour).save(buffer, "png")
    return buffer.getvalue()


def conversation(*turns: tuple[str, str], images: int = 1) -> list[dict]:
    """Messages of one record: the images before the first question, then questions and answers."""
    messages: list[dict] = []
    for number, (question, answer) in enumerate(turns):
        text = {"type": "text", "text": question}
        content = [{"type": "image"}] * images + [text] if number == 0 else question
        messages.append({"role": "user", "content": content})
        messages.append({"role": "assistant", "content": answer})
    return messages


def write_shard(
    path: Path, records: dict[str, tuple[list[dict], list[bytes]]], independent: bool = True
) -> Path:
    """A tar of records: key -> (messages, image files)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for key, (messages, images) in records.items():
            record = {"messages": messages, "source": "t", "independent_turns": independent}
            members = {f"{key}.json": json.dumps(record).encode()}
            members |= {f"{key}.img{number}.png": data for number, data in enumerate(images)}
            for name, data in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path


def small_set(folder: Path, pictures: int = 3) -> Path:
    """A test split of `pictures` pictures with three questions each."""
    colours = ("red", "blue", "green", "yellow", "black")
    records = {}
    for number in range(pictures):
        colour = colours[number % len(colours)]
        turns = (
            ("what is the color of the shape?", colour),
            ("is there a circle?", "no"),
            ("what shape does the image contain?", "rectangle"),
        )
        records[f"test{number:04d}"] = (conversation(*turns), [png(colour)])
    write_shard(folder / "test-000000.tar", records)
    return folder


def describe_tasks(folder: Path, pictures: int = 3) -> str:
    """For `--tasks`: questions of `small_set`, once answered and once by the likeliest choice."""
    small_set(folder, pictures)
    for mode in ("generate", "choose"):
        text = "data: test-*.tar\nchoices: [red, blue, green, 'no', rectangle]\n"
        (folder / f"{mode}.yaml").write_text(f"{text}mode: {mode}\n")
    return f"{folder / 'generate.yaml'},{folder / 'choose.yaml'}"
