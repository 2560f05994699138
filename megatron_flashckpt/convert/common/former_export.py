"""Recognition of results of earlier conversions; `--overwrite` replaces only those.

A result in a foreign format has a list of its files, `.flashckpt-export.json`. The list identifies
a file by name, size and the second of its last write. A converted checkpoint in our own format is
marked in its manifest, and its files have the name of their save.
"""

from __future__ import annotations

import contextlib
import stat
from pathlib import Path

import msgspec

from megatron_flashckpt.errors import UNDECODABLE, ConfigError, FlashCkptError, first_few
from megatron_flashckpt.file_format import file_names, manifest
from megatron_flashckpt.storage.opening import open_store
from megatron_flashckpt.storage.store import read_whole

MARKER = ".flashckpt-export.json"
CONVERTED_FROM = "converted_from"

#: Bytes to read of the list, at most: our lists are shorter.
_MAX_MARKER_NBYTES = 2**28


class _File(msgspec.Struct, frozen=True):
    nbytes: int
    written_at: int
    """Seconds since 1970; some file systems do not keep fractions."""


class _Marker(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of `MARKER`."""

    written_by: str
    files: dict[str, _File]
    """Files by path relative to the directory."""


def mark(directory: Path) -> None:
    """Write a list of all files in `directory` to its `MARKER`."""
    files = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode):
            files[str(path.relative_to(directory))] = _File(status.st_size, int(status.st_mtime))
    listed = _Marker(written_by="flashckpt convert", files=files)
    (directory / MARKER).write_bytes(msgspec.json.format(msgspec.json.encode(listed), indent=1))


def refuse_others(directory: Path) -> None:
    """Raise if `directory` has content that one earlier conversion did not write.

    Files of that conversion may be missing. An empty directory passes.

    Raises:
        ConfigError: the message names the foreign files.
    """
    if directory.is_symlink() or not directory.is_dir():
        raise ConfigError(
            f"{directory}: is not a directory, so no conversion wrote it; name another directory"
        )
    foreign = sorted(str(path.relative_to(directory)) for path in _foreign(directory))
    if foreign:
        raise ConfigError(
            f"{directory}: holds files that 'flashckpt convert' did not write: "
            f"{first_few(foreign)}; nothing was changed; name another directory, or move these "
            "files away"
        )


def remove(directory: Path) -> bool:
    """Delete the files of an earlier conversion in `directory`; return whether it is gone.

    Other files stay, with the directories that hold them.
    """
    files, directories = _written(directory)
    for path in files:
        path.unlink()
    for path in sorted({*directories, directory}, reverse=True):
        with contextlib.suppress(OSError):  # holds other files
            path.rmdir()
    return not directory.exists()


def _foreign(directory: Path) -> list[Path]:
    """Return all paths in `directory` that one earlier conversion did not write."""
    files, directories = _written(directory)
    return [path for path in directory.rglob("*") if path not in files | directories]


def _written(directory: Path) -> tuple[set[Path], set[Path]]:
    """Return the files in `directory` that one earlier conversion wrote, and their directories."""
    listed = _listed(directory)
    files = _of_our_format(directory) if listed is None else listed
    inside = {parent for path in files for parent in path.relative_to(directory).parents}
    directories = {directory / parent for parent in inside if parent.name}
    return files, {path for path in directories if path.is_dir() and not path.is_symlink()}


_MARKER = msgspec.json.Decoder(_Marker)


def _listed(directory: Path) -> set[Path] | None:
    """Return the files that `MARKER` lists and that are unchanged; None without a list."""
    try:
        encoded = read_whole(open_store(directory), MARKER, _MAX_MARKER_NBYTES)
        listed = _MARKER.decode(encoded)
    except (FlashCkptError, OSError, *UNDECODABLE):
        return None
    return {directory / MARKER} | {
        directory / name
        for name, file in listed.files.items()
        if ".." not in Path(name).parts and _is_unchanged(directory / name, file)
    }


def _is_unchanged(path: Path, file: _File) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and (
        (status.st_size, int(status.st_mtime)) == (file.nbytes, file.written_at)
    )


def _of_our_format(directory: Path) -> set[Path]:
    """Return the files of a converted checkpoint of ours; empty if it is not one."""
    store = open_store(directory.parent)
    written: set[str] = set()
    try:
        names = [entry.name for entry in store.list(directory.name, sizes=False)]
        for save_id in file_names.ends_in(names):
            end = file_names.end_name(save_id)
            encoded = read_whole(store, f"{directory.name}/{end}", manifest.MAX_MANIFEST_NBYTES)
            stored = manifest.decode_manifest(encoded, str(directory / end))
            if CONVERTED_FROM in stored.description:
                written |= {end, file_names.common_name(save_id)}
                written |= {shard.file for shard in stored.shards}
    except (FlashCkptError, OSError):
        return set()
    return {path for name in written if _is_file(path := directory / name)}


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()
