"""Checkpoints that are known to be whole: checksums of what was read back, and what damage is.

Ranks share the files, so that a large checkpoint is read once, by all of them together.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

from conceptmoe_vl.errors import UserError
from conceptmoe_vl.files import sha256_of, sync

from .distributed import World, gather_objects, raise_together, share_from_main
from .run_files import DamagedCheckpointError, file_sizes, read_manifest


def _broken_member(path: Path) -> str | None:
    """The first part of a torch file whose checksum, made in memory when written, is not met."""
    if path.suffix != ".pt":
        return None
    try:
        with zipfile.ZipFile(path) as file:
            return file.testzip()
    except zipfile.BadZipFile as error:
        return str(error)


def checked_files(folder: Path, world: World) -> dict[str, dict[str, Any]]:
    """Bytes and sha256 of every file below a folder just written, by relative path. Collective.

    Every file is on the disk and read back; those of torch are also held against the checksums
    inside them.

    Raises:
        UserError: a file is not what was written.
    """
    sizes: dict[str, int] = share_from_main(file_sizes(folder) if world.is_main else None)
    own: dict[str, dict[str, Any]] = {}
    broken: list[str] = []
    for name in sorted(sizes)[world.rank :: world.size]:
        try:
            sync(folder / name)
            part = _broken_member(folder / name)
            own[name] = {"bytes": sizes[name], "sha256": sha256_of(folder / name)}
        except OSError as error:
            part = str(error)
        broken += [f"{name} ({part})"] if part is not None else []
    merged: dict[str, dict[str, Any]] = {}
    wrong: list[str] = []
    for files, errors in gather_objects((own, broken)):
        merged |= files
        wrong += errors
    if wrong:
        raise UserError(
            f"the checkpoint in {folder} was not written whole: {', '.join(wrong)}; look at the "
            "disk, then resume from the checkpoint before"
        )
    return merged


def damage_of(checkpoint: Path, world: World) -> str | None:
    """What is wrong with a checkpoint, the same on every rank; None where nothing is. Collective.

    Every file is read and held against the manifest's checksums.

    Raises:
        UserError: another version wrote it.
    """
    found: str | None = None
    refused: UserError | None = None
    try:
        files = read_manifest(checkpoint)["files"]
        for name in sorted(files)[world.rank :: world.size]:
            if sha256_of(checkpoint / name) != files[name]["sha256"]:
                found = (
                    f"checkpoint {checkpoint} is damaged: {name} has not the checksum that was "
                    "written"
                )
                break
    except DamagedCheckpointError as error:
        found = str(error)
    except UserError as error:
        refused = error
    except OSError as error:
        found = f"checkpoint {checkpoint} is damaged: {error}"
    raise_together(refused)
    return next((text for text in gather_objects(found) if text is not None), None)
