"""Checks of the state after a crash, read directly from memory and storage."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from megatron_flashckpt.catalog.listing import committed_iterations
from megatron_flashckpt.catalog.stored_checkpoint import StoredCheckpoint, open_checkpoint
from megatron_flashckpt.catalog.verify import verify
from megatron_flashckpt.errors import CorruptCheckpointError, FlashCkptError
from megatron_flashckpt.file_format.file_names import (
    OWN,
    TRACKER,
    common_name,
    end_name,
    iteration_dir,
)
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import COMPLETE
from megatron_flashckpt.storage.opening import open_store
from megatron_flashckpt.storage.retrying_store import RetryingStore
from tests.support.stored import is_failed_end, names_in, tracked
from tools.crash import trouble
from tools.crash.job import PATIENCE_S, CellError, eventually


def in_memory(agents: list[int], ranks: int) -> int | None:
    """Return the newest iteration of which all ranks hold a complete slot of the same save."""
    held: list[dict[str, int]] = [{} for _ in range(ranks)]
    for agent in agents:
        for entry in Path(f"/proc/{agent}/fd").iterdir():
            match = re.match(r"/memfd:flashckpt-(\d+)", os.readlink(entry))
            if match is None:
                continue
            slab = Slab.attach(os.open(entry, os.O_RDWR))
            for slot in slab.slots:
                header = slot.header
                if header.state in COMPLETE:
                    held[int(match[1])][header.save_id] = header.iteration
            slab.close()
    common = set(held[0]).intersection(*held[1:])
    return max((held[0][save_id] for save_id in common), default=None)


def committed(save: Path | str) -> list[int]:
    """Return all iterations that have a committed save, oldest first.

    Reads are retried, because the process of a cell may get transient errors.
    """
    return committed_iterations(RetryingStore(open_store(save)))


def stored_patiently(save: Path | str, iteration: int) -> StoredCheckpoint:
    """Open a checkpoint with retries, because the process of a cell may get transient errors."""
    return open_checkpoint(RetryingStore(open_store(save)), iteration)


def check_storage(save: Path | str) -> None:
    """Fail if a partial checkpoint looks complete, or if the tracker names no committed checkpoint.

    Retention may run at the same time; it removes the end of a checkpoint before other files.
    """
    for iteration in committed(save):
        try:
            damages: list[FlashCkptError] = verify(open_checkpoint(open_store(save), iteration))
        except FileNotFoundError as error:
            damages = [CorruptCheckpointError(str(error))]
        if damages and iteration in committed(save):
            raise CellError(f"iteration {iteration} has a manifest, but: {damages}")
    said = tracked(save)
    if said and (not said.isdecimal() or int(said) not in (complete := committed(save))):
        raise CellError(f"the tracker says '{said}'; there are {complete}")


def check_tidy(save: Path | str, newest: int) -> None:
    """Fail if files are left over that later commits remove."""
    if committed(save)[-1:] != [newest] or tracked(save) != str(newest):
        raise CellError(f"iteration {newest} is not the newest of {committed(save)}")
    expected = {TRACKER}
    for iteration in committed(save):
        manifest = open_checkpoint(open_store(save), iteration).manifest
        files = [shard.file for shard in manifest.shards]
        files += [end_name(manifest.save_id), common_name(manifest.save_id)]
        expected |= {f"{iteration_dir(iteration)}/{file}" for file in files}
    left = [name for name in names_in(save) if not name.startswith(f"{OWN}/")]
    # The end of a failed save goes last, after the deadline of all nodes that may wait for it.
    left = [name for name in left if name not in expected and not is_failed_end(save, name)]
    # The removal of the last file may report an error although it succeeded. Then the empty
    # directory stays, because another node might be about to fill it.
    if isinstance(save, Path) and not trouble.is_on_faulty_storage(save):
        left += [path.name for path in save.iterdir() if path.is_dir() and not any(path.iterdir())]
    if left:
        raise CellError(f"left behind: {sorted(left)}")


def await_tidy(save: Path | str, newest: int, within_s: float = PATIENCE_S) -> None:
    """Wait until no files are left over; agents of earlier runs may still write some."""

    def is_tidy() -> bool:
        with contextlib.suppress(CellError):
            check_tidy(save, newest)
            return True
        return False

    try:
        eventually("no file is left over", is_tidy, within_s=within_s)
    except AssertionError:
        check_tidy(save, newest)  # names the files
        raise


def check_left(runtime_dir: Path) -> None:
    """Fail if agents that ended have left files, except logs of errors."""
    logs = list(runtime_dir.rglob("agent-*.log"))
    left = [path.name for path in runtime_dir.rglob("*") if path.is_file() and path not in logs]
    if left:
        raise CellError(f"the agent left {left}")
