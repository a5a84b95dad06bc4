"""Files of a run's folder: metrics lines, checkpoints, and how half-written ones are avoided.

run_dir/config.yaml            the resolved configuration
run_dir/metrics.jsonl          a line per logged step
run_dir/evaluation.jsonl       a line per evaluation on held-out data
run_dir/nonfinite.jsonl        steps that were skipped, with the keys of their samples
run_dir/rollbacks.jsonl        spikes of the loss that the run was rolled back from
run_dir/checkpoints/step-N/    resumable state: manifest.json, engine/, rank-R.pt
run_dir/checkpoints/latest     name of the newest checkpoint, written when it has been verified
run_dir/model/                 what `from_pretrained` loads
"""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.files import remove_unfinished, written_whole

LINES = ("metrics.jsonl", "evaluation.jsonl", "nonfinite.jsonl", "rollbacks.jsonl")
_STEP = re.compile(r"step-(\d+)")
_REMOVED = ".removed-"  # a checkpoint that is being removed
FORMAT = 2


class DamagedCheckpointError(UserError):
    """A checkpoint whose files are not those that were written."""


def _finite(value: Any) -> Any:
    """JSON has no NaN: what is not finite becomes a string, which no reader takes for a number."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return value


def append_line(path: Path, values: dict[str, Any]) -> None:
    """Appends one JSON line and flushes it."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(_finite(values)) + "\n")


def read_lines(path: Path) -> list[dict]:
    """The lines of a JSON lines file;
    a last line that a killed run left half-written is dropped.

    Raises:
        UserError: another line is no JSON.
    """
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            found += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            raise UserError(
                f"line {number} of {path} is no JSON ({error}); mend or remove that line"
            ) from error
    return found


def drop_lines_after(path: Path, step: int) -> None:
    """Removes the lines of later steps, so that a resumed run writes each step once."""
    _rewrite_lines(path, [line for line in read_lines(path) if line.get("step", 0) <= step])


def keep_first_lines(path: Path, number: int) -> None:
    """Removes all but the first `number` lines."""
    _rewrite_lines(path, read_lines(path)[:number])


def _rewrite_lines(path: Path, lines: list[dict]) -> None:
    if path.exists():
        write_text(path, "".join(json.dumps(line) + "\n" for line in lines))


def write_json(path: Path, values: dict) -> None:
    """Writes a JSON file, whole or not at all."""
    write_text(path, json.dumps(values, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a text file, whole or not at all."""
    with written_whole(path) as beside:
        beside.write_text(text, encoding="utf-8")


def replace_folder(written: Path, target: Path) -> None:
    """Renames a complete folder to `target`; a folder already there gives way only then."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    written.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def recover_folders(run_dir: Path) -> list[Path]:
    """Ends what a killed run has begun: replacing a folder or a file, or removing a checkpoint.

    Returns:
        The folders that were put back.
    """
    found = []
    for name in ("config.yaml", *LINES, "checkpoints/latest"):
        remove_unfinished(run_dir / name)
    for left in (run_dir / "checkpoints").glob(f"{_REMOVED}*"):
        shutil.rmtree(left)
    for pattern in (".model.old", ".adapter.old", ".processor.old", "checkpoints/.step-*.old"):
        for old in run_dir.glob(pattern):
            target = old.with_name(old.name[1 : -len(".old")])
            if target.exists():
                shutil.rmtree(old)  # the new one had taken its place
            else:
                old.rename(target)
                found.append(target)
    return found


def checkpoints_in(folder: Path) -> list[Path]:
    """Complete checkpoints (those with a manifest), oldest step first."""
    found = [
        path
        for path in folder.glob("step-*")
        if _STEP.fullmatch(path.name) and (path / "manifest.json").exists()
    ]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    match = _STEP.fullmatch(checkpoint.name)
    if match is None:
        raise UserError(f"{checkpoint} is no checkpoint: its name is not step-N")
    return int(match[1])


def file_sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file below `folder`, by relative path."""
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def read_manifest(checkpoint: Path) -> dict:
    """The manifest of a checkpoint whose files are all there at their sizes.

    Raises:
        DamagedCheckpointError: the folder is no checkpoint, or a file is missing or has another
            size.
        UserError: another version wrote it.
    """
    path = checkpoint / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DamagedCheckpointError(
            f"{checkpoint} is no complete checkpoint: cannot read manifest.json ({error})"
        ) from error
    if manifest.get("format") != FORMAT:
        raise UserError(
            f"{checkpoint} has checkpoint format {manifest.get('format')}; this version reads "
            f"{FORMAT}"
        )
    present = file_sizes(checkpoint)
    for name, written in manifest["files"].items():
        if present.get(name) != written["bytes"]:
            raise DamagedCheckpointError(
                f"checkpoint {checkpoint} is damaged: {name} has {present.get(name, 'no')} bytes, "
                f"{written['bytes']} were written"
            )
    return manifest


def remove_old_checkpoints(folder: Path, keep: int, keep_every: int = 0) -> None:
    """Removes all but the newest `keep` checkpoints (0 keeps all) and what killed writes left.

    Those of every `keep_every` steps stay (0: none).
    """
    for left in folder.glob(".writing-*"):
        shutil.rmtree(left, ignore_errors=True)
    for path in checkpoints_in(folder)[:-keep] if keep else []:
        if not keep_every or step_of(path) % keep_every:
            remove_checkpoint(path)


def remove_checkpoint(path: Path) -> None:
    """Removes a checkpoint; if that is cut short, what is left is none."""
    removed = path.with_name(_REMOVED + path.name)
    shutil.rmtree(removed, ignore_errors=True)
    path.rename(removed)
    shutil.rmtree(removed)
