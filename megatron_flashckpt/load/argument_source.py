"""Record of the checkpoints from which `--use-checkpoint-args` took this rank's arguments.

The nodes of a job read before torch.distributed is initialised, so storage may show them different
checkpoints. A load compares the records of all ranks in collectives that it needs anyway.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_flashckpt.errors import FlashCkptError


class ArgumentSource(NamedTuple):
    """A checkpoint from which arguments were taken."""

    iteration: int
    save_id: str
    digest: str
    """Digest of the names and values of the arguments that the checkpoint changed."""


#: Sources by Megatron's name of the directory argument: `load`, `pretrained_checkpoint`.
_chosen: dict[str, ArgumentSource] = {}


def note(load_arg: str, source: ArgumentSource | None) -> None:
    """Note the source in the directory that `load_arg` names; None if no argument was taken."""
    _chosen.pop(load_arg, None)
    if source is not None:
        _chosen[load_arg] = source


def chosen_sources() -> dict[str, ArgumentSource]:
    """Return the sources by the name of the directory argument."""
    return dict(_chosen)


def disagreement(first: dict[str, ArgumentSource]) -> FlashCkptError | None:
    """Return an error if this rank's arguments differ from those of rank 0, else None.

    Different checkpoints alone are no error: the tracker may have moved between two reads, and
    checkpoints of one run usually have equal arguments.

    Args:
        first: the result of `chosen_sources` on rank 0.
    """
    for load_arg in sorted(first.keys() | _chosen.keys()):
        own, other = _chosen.get(load_arg), first.get(load_arg)
        if own == other or (own and other and own.digest == other.digest):
            continue
        if own and other and own.save_id == other.save_id:
            continue  # the command lines differ, and Megatron decides whether that is an error
        return FlashCkptError(
            f"--use-checkpoint-args: arguments were taken from {_named(own)} in --{load_arg}, on "
            f"rank 0 from {_named(other)}, and differ: storage showed the nodes different states "
            "of that directory; start again, or choose an iteration with --ckpt-step"
        )
    return None


def _named(source: ArgumentSource | None) -> str:
    return f"iteration {source.iteration} (save {source.save_id})" if source else "no checkpoint"
