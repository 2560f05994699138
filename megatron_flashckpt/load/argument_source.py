"""The checkpoints that `--use-checkpoint-args` has taken this rank's arguments from.

The nodes of a job read before torch.distributed is initialised, so storage may show them different
checkpoints. A load compares what they have taken, in collectives that it makes anyway.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_flashckpt.errors import FlashCkptError


class ArgumentSource(NamedTuple):
    """One checkpoint that arguments were taken from."""

    iteration: int
    save_id: str
    digest: str
    """Of the arguments that it has changed, and their values."""


#: By Megatron's name of the directory's argument: `load`, `pretrained_checkpoint`.
_taken: dict[str, ArgumentSource] = {}


def note(load_arg: str, source: ArgumentSource | None) -> None:
    """Note what was taken from the directory that `load_arg` names; None: nothing of ours."""
    _taken.pop(load_arg, None)
    if source is not None:
        _taken[load_arg] = source


def taken() -> dict[str, ArgumentSource]:
    """Return the checkpoints that arguments were taken from, by the directory's argument."""
    return dict(_taken)


def disagreement(first: dict[str, ArgumentSource]) -> FlashCkptError | None:
    """Return the error of a rank whose arguments are not those of rank 0; None: they are.

    Two checkpoints of one run usually have equal arguments. The tracker may have moved between two
    looks, so two checkpoints alone are no error.

    Args:
        first: what `taken` returns on rank 0.
    """
    for load_arg in sorted(first.keys() | _taken.keys()):
        own, other = _taken.get(load_arg), first.get(load_arg)
        if own == other or (own and other and own.digest == other.digest):
            continue
        if own and other and own.save_id == other.save_id:
            continue  # the command lines differ, which is for Megatron to judge
        return FlashCkptError(
            f"--use-checkpoint-args: arguments were taken from {_named(own)} in --{load_arg}, on "
            f"rank 0 from {_named(other)}, and differ: storage showed the nodes different states "
            "of that directory; start again, or choose an iteration with --ckpt-step"
        )
    return None


def _named(source: ArgumentSource | None) -> str:
    return f"iteration {source.iteration} (save {source.save_id})" if source else "no checkpoint"
