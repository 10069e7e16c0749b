"""Which files make up a checkpoint: one file, an index with its shards, or a folder."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hswq_lab.errors import HswqError
from hswq_lab.json_file import json_of

if TYPE_CHECKING:
    from pathlib import Path

INDEX_SUFFIX = ".safetensors.index.json"
CONTENT_KEY = "hswq.content"
"""Metadata of every part that we write, and of their index: a digest of the whole checkpoint."""

_SHARD = re.compile(r"^(?P<stem>.*?)-?(?P<number>\d+)-?of-?(?P<count>\d+)\.safetensors$")
_MAX_INDEX_BYTES = 100_000_000


@dataclass(frozen=True)
class FileSet:
    """The files of a checkpoint.

    Attributes:
        files: safetensors files, in order.
        index: tensor → file, where an index says so; else None.
        content: the digest in the index, None without.
        warnings: for the reader.
    """

    files: list[Path]
    index: dict[str, Path] | None = None
    content: str | None = None
    warnings: list[str] = field(default_factory=list)


def locate(path: Path) -> FileSet:
    """Find the files that a path stands for.

    Args:
        path: a .safetensors file, a `*.index.json`, or a folder that holds either (or holds `transformer/`).

    Raises:
        HswqError: nothing there, more than one candidate, or an index that is wrong or leads out of its
            folder.
    """
    if path.is_dir():
        return _in_folder(path)
    if path.name.endswith(".index.json"):
        return _from_index(path)
    warnings = []
    shard = _SHARD.match(path.name)
    if shard is not None and int(shard["count"]) > 1:
        warnings.append(f"{path.name} is one of {shard['count']} parts, read alone; open the folder for all")
    return FileSet([path], warnings=warnings)


def _in_folder(folder: Path) -> FileSet:
    if (folder / "transformer").is_dir():
        folder = folder / "transformer"
    indexes = sorted(folder.glob("*.index.json"))
    files = sorted(folder.glob("*.safetensors"))
    parts = [(match, file) for file in files if (match := _SHARD.match(file.name))]
    whole = [file for file in files if not _SHARD.match(file.name)]
    stems = {match["stem"] for match, _ in parts}
    if len(indexes) == 1:
        split = _from_index(indexes[0])
        return _the_only_one(split, indexes[0].name.removesuffix(INDEX_SUFFIX), folder)
    if not indexes and len(stems) == 1:
        return _the_only_one(FileSet(_all_parts(folder, parts)), next(iter(stems)), folder)
    if not indexes and not parts and len(whole) == 1:
        return FileSet(whole)
    candidates = ", ".join(file.name for file in [*indexes, *files]) or "no .safetensors file"
    raise HswqError(
        "the folder does not hold exactly one checkpoint",
        file=folder,
        found=candidates[:500],
        expected="one .safetensors file, one *.index.json, or a transformer/ folder with one",
        fix="give the file itself",
    )


def _the_only_one(split: FileSet, stem: str, folder: Path) -> FileSet:
    """Parts, unless a whole file of the same name lies beside them: one of the two is an older save."""
    whole = folder / f"{stem}.safetensors"
    if whole.is_file() and whole not in split.files:
        raise HswqError(
            "the folder holds a checkpoint of one name twice: as a whole file and as parts",
            file=folder,
            found=f"{whole.name} and {split.files[0].name}",
            fix="give the file or the index itself, or take the older one away",
        )
    return split


def _all_parts(folder: Path, parts: list[tuple[re.Match[str], Path]]) -> list[Path]:
    """A complete set of parts without an index; other files beside it (LoRAs, a text encoder) are something else."""
    counts = {int(match["count"]) for match, _ in parts}
    numbers = {int(match["number"]): file for match, file in parts}
    if len(counts) > 1 or len(numbers) < len(parts):
        raise HswqError(
            "parts of more than one checkpoint are in the folder, and no index says which belong together",
            file=folder,
            found=", ".join(file.name for _, file in parts)[:500],
            fix="take away those of the other one",
        )
    if sorted(numbers) != list(range(1, max(counts) + 1)):
        raise HswqError(
            "parts of the checkpoint are missing", file=folder, found=sorted(numbers), expected=max(counts)
        )
    return [numbers[number] for number in sorted(numbers)]


def _from_index(path: Path) -> FileSet:
    try:
        if path.stat().st_size > _MAX_INDEX_BYTES:
            raise HswqError(
                "the index is too large", file=path, found=path.stat().st_size, expected=_MAX_INDEX_BYTES
            )
        content = json_of(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise HswqError("the file does not exist", file=path, fix="check the name and the folder") from error
    except OSError as error:
        raise HswqError("the index cannot be read", file=path, found=error) from error
    except ValueError as error:
        raise HswqError("the index is not valid JSON", file=path, found=str(error)[:200]) from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise HswqError("the index has no weight_map", file=path)
    named = {file for file in weight_map.values() if isinstance(file, str)}
    if len(named) != len(set(map(repr, weight_map.values()))):
        raise HswqError("the index maps a tensor to something that is no file name", file=path)
    shards = {name: _shard(path, name) for name in sorted(named)}
    told = content.get("metadata") if isinstance(content, dict) else None
    stated = told.get(CONTENT_KEY) if isinstance(told, dict) else None
    placed = {tensor: shards[name] for tensor, name in weight_map.items()}
    return FileSet(list(shards.values()), placed, None if stated is None else str(stated))


def _shard(index: Path, name: str) -> Path:
    """The file of a shard, which must lie in the index's folder (or, by a link, in a hub cache's blobs)."""
    shard = index.parent / name
    if "/" in name or "\\" in name or "\0" in name or name in ("", ".", ".."):
        raise HswqError(
            "the index leads out of its folder", file=index, found=name[:200], expected="a bare file name"
        )
    try:
        exists = shard.is_file()
    except OSError:  # a name that is too long for any file
        exists = False
    if not exists:
        raise HswqError("a shard named by the index does not exist", file=index, found=name[:200])
    folder = index.parent.resolve()
    # The hub's cache keeps snapshots/<revision>/<name> as links to blobs/<hash>.
    blobs = folder.parent.parent / "blobs"
    if shard.resolve().parent not in (folder, blobs, folder.parent.parent.parent / "blobs"):
        raise HswqError(
            "a shard is a link that leads out of the index's folder", file=index, found=shard.resolve()
        )
    return shard
