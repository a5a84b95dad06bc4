"""Remote shards by pattern, with their numbers of samples from the manifest."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conceptmoe_vl.errors import UserError
from data_pipelines.remote_opening import PIPE, StreamError, file_name, is_remote, shown
from data_pipelines.remote_streams import Limits, RemoteFile
from data_pipelines.shards import expand_ranges
from data_pipelines.writing import MANIFEST

_LARGEST_MANIFEST = 1 << 28  # bytes


@dataclasses.dataclass(frozen=True)
class RemoteShard:
    """A shard to read from elsewhere.

    Fields:
        address: with what may be secret in it; for messages use `shown`.
        shown: as messages, names and counts call it; its last part is the file's name.
        samples: by the manifest.
        size: bytes by the manifest; None: it does not say.
        sha256: by the manifest, "" where it does not say.
    """

    address: str
    shown: str
    samples: int
    size: int | None
    sha256: str


def find_remote_shards(
    patterns: Sequence[str], manifest: str | None, limits: Limits, where: str
) -> list[RemoteShard]:
    """The shards of patterns, without repetition: patterns in their order, the rest by name.

    Args:
        manifest: path or address; None: `manifest.json` beside each pattern's shards.
        where: how messages call the configuration's field, `data.shards`.

    Raises:
        UserError: a pattern or the manifest cannot be used, or a shard is not in the manifest.
    """
    shards: dict[str, RemoteShard] = {}
    manifests: dict[str, dict[str, dict[str, Any]]] = {}
    for pattern in patterns:
        if not is_remote(pattern):
            raise UserError(
                f"{where}: '{pattern}' is local and other shards are remote; give local and remote "
                "shards as two sources with weights"
            )
        path = manifest or _manifest_beside(pattern, where)
        if path not in manifests:
            manifests[path] = _load_manifest(path, limits, where)
        for address in _expand(pattern, manifests[path], where):
            shard = _shard(address, manifests[path], shown(path), where)
            if shards.setdefault(shard.shown, shard) != shard:
                raise UserError(
                    f"{where}: two shards are called '{shard.shown}'; name each shard once"
                )
    return list(shards.values())


def _manifest_beside(pattern: str, where: str) -> str:
    if pattern.startswith(PIPE):
        raise UserError(
            f"{where}: '{shown(pattern)}' is a command, so its manifest must be named: give it as "
            "data.sources with name, shards and manifest"
        )
    bare = pattern.partition("?")[0]
    return f"{bare.rpartition('/')[0]}/{MANIFEST}"


def _load_manifest(path: str, limits: Limits, where: str) -> dict[str, dict[str, Any]]:
    """The manifest's shards by name."""
    said = f"{where}: the manifest '{shown(path) if is_remote(path) else path}'"
    try:
        data = _read(path, limits)
    except (StreamError, OSError) as error:
        detail = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(
            f"{said} cannot be read ({detail}); write it beside the shards with 'python -m "
            "data_pipelines index FOLDER --manifest', or name it in data.sources[].manifest"
        ) from error
    try:
        splits = json.loads(data)["splits"].values()
        entries = [entry for split in splits for entry in split["shards"]]
        shards = {entry["name"]: entry for entry in entries}
        sound = all(
            isinstance(name, str)
            and _is_count(entry["samples"])
            and (entry.get("bytes") is None or _is_count(entry["bytes"]))
            for name, entry in shards.items()
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{said} is no manifest of shards ({type(error).__name__}: {error}); write it with "
            "'python -m data_pipelines index FOLDER --manifest'"
        ) from error
    if not sound or len(shards) != len(entries):
        raise UserError(f"{said} names a shard twice or without its number of samples; repair it")
    return shards


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _read(path: str, limits: Limits) -> bytes:
    if path.startswith(PIPE):
        raise StreamError("a command gives no manifest; name a file or an address")
    if not is_remote(path):
        return Path(path).read_bytes()
    file = RemoteFile(path, None, limits)
    try:
        data = file.read(_LARGEST_MANIFEST + 1)
    finally:
        file.close()
    if len(data) > _LARGEST_MANIFEST:
        raise StreamError(f"it is larger than {_LARGEST_MANIFEST} bytes")
    return data


def _expand(pattern: str, manifest: dict[str, Any], where: str) -> list[str]:
    """Addresses of a pattern: ranges in braces; in the last part also `*` and `[...]`, and a
    folder's end `/` means all of its shards.
    """
    found: list[str] = []
    for part in expand_ranges(pattern):
        bare, mark, query = part.partition("?")
        folder, slash, name = bare.rpartition("/")
        name = name or "*.tar"
        if part.startswith(PIPE) or not any(sign in name for sign in "*["):
            found.append(part)
            continue
        names = sorted(each for each in manifest if fnmatch.fnmatchcase(each, name))
        if not names:
            raise UserError(f"{where}: no shard of the manifest matches '{shown(part)}'")
        found += [f"{folder}{slash}{each}{mark}{query}" for each in names]
    return found


def _shard(address: str, manifest: dict[str, Any], path: str, where: str) -> RemoteShard:
    name = file_name(address)
    if not name:
        raise UserError(
            f"{where}: a command names no shard; end it with the name in the manifest, as a "
            "comment: 'pipe:fetch 17 # train-000017.tar'"
        )
    if not name.endswith(".tar"):
        raise UserError(f"{where}: '{shown(address)}' is no .tar file; unpack compressed shards")
    if name not in manifest:
        raise UserError(
            f"{where}: '{shown(address)}' is not in the manifest '{path}', which has "
            f"{len(manifest)} shards; correct the name, or write the manifest again"
        )
    entry = manifest[name]
    sha256 = str(entry.get("sha256") or "")
    return RemoteShard(address, shown(address), entry["samples"], entry.get("bytes"), sha256)
