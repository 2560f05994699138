"""The object of a run: who trains, and from which checkpoints its state descends.

A run is one agreed load of a job, or the first save of a job that loads nothing. Its object is
created once, under the run's number (`file_names.run_file`), so that no two runs have one number.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from megatron_flashckpt.errors import UNDECODABLE, CorruptCheckpointError
from megatron_flashckpt.file_format.file_names import run_number
from megatron_flashckpt.file_format.seal import broken_seal, seal

#: In place of a run in `Ancestor`: a checkpoint that no run of this format has saved.
FOREIGN = "foreign"


class Ancestor(msgspec.Struct, frozen=True, array_like=True):
    """A run from which another one descends."""

    run: str
    """Name of the run; `FOREIGN` for Megatron's own checkpoints and other formats."""
    left_at: int
    """Iteration at which the descendant has left it: later saves are not of its history."""


Ancestors = tuple[Ancestor, ...]
"""All ancestors of a run, the nearest first. Empty: the run began from scratch."""


Source = Literal["memory", "storage", "scratch"]
"""Source of the first state of a run."""


class RunObject(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of `flashckpt/runs/000008.json`."""

    name: str
    ancestors: Ancestors = ()
    save_id: str | None = None
    """The save that the run resumed from; None: from scratch, or a foreign checkpoint."""
    iteration: int = 0
    """Iteration that the run resumed from; 0: from scratch."""
    source: Source = "scratch"
    opened_at: float = 0.0
    """Seconds since 1970 on the host of rank 0."""
    host: str = ""
    world_size: int = 0


def encode_run(run: RunObject) -> bytes:
    """Return the contents of the object."""
    return seal(msgspec.json.encode(run))


_RUN = msgspec.json.Decoder(RunObject)


def decode_run(encoded: bytes, place: str) -> RunObject:
    """Return the run in the object `place`.

    Raises:
        CorruptCheckpointError: `encoded` is not a run, or was changed after it was written.
    """
    try:
        run = _RUN.decode(encoded)
        if not run_number(run.name):
            raise ValueError(f"{run.name!r} is not the name of a run")
        if (problem := broken_seal(encoded)) is not None:
            raise ValueError(problem)
        return run
    except (ValueError, *UNDECODABLE) as error:
        raise CorruptCheckpointError(f"{place}: is not the object of a run ({error})") from error
