"""Exceptions of this package, as one small tree.

Each message states the fact, the place and the remedy, and lists all offenders at once. An
error that matches a standard one inherits it, so that `except FileNotFoundError` keeps working.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence

import msgspec

from megatron_flashckpt.error_classes import class_of

#: Errors of msgspec for bytes that it cannot decode. Any byte of any file may be damaged.
UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

#: Remedy for a damaged checkpoint, in the words of a training job; see `for_command`.
OLDER = "load an older iteration with --ckpt-step"
#: Remedy for a checkpoint that is missing, or belongs to another model.
ANOTHER = "choose another iteration with --ckpt-step"
#: Megatron's options that messages name, as patterns, and the same in a loop that has no options:
#: arguments of `megatron_flashckpt.Checkpointer` and of its `load`.
_OF_LOOP = {
    r"--ckpt-step (?=\d)": "step=",
    r"--ckpt-step": "step=N",
    r"--load (?=\S)": "directory=",
    r"--load(?![\w-])": "directory",
    r"--finetune (and|or) --no-load-optim|--no-load-optim or --finetune": "weights_only=True",
    r"--finetune": "weights_only=True",
    r"--no-save-optim": "save_optimizer=False",
}


class FlashCkptError(Exception):
    """Base class of all errors that this package raises on purpose."""

    repeats = False
    """True if the error happened on another rank, which the message names."""


class ConfigError(FlashCkptError, ValueError):
    """A setting (file, environment variable, argument) is unknown or has a wrong value."""


class UnsupportedError(FlashCkptError, NotImplementedError):
    """The training job uses a feature that this package cannot checkpoint (yet)."""


class LayoutError(FlashCkptError, ValueError):
    """Pieces contradict each other: overlapping, out of bounds, or of unknown type."""


class MissingStateError(FlashCkptError, KeyError):
    """A checkpoint lacks state that the model needs; the message names every key."""

    differences: tuple[str, ...] = ()
    """Lines that describe the missing keys, if the keys were compared one by one."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0]) if self.args else ""


class StorageError(FlashCkptError, OSError):
    """Storage refused an operation: full, read-only, permission, I/O error."""


class AlreadyExistsError(StorageError, FileExistsError):
    """The name to create exists already, whoever created it."""


class NotCommittedError(FlashCkptError, FileNotFoundError):
    """The wanted checkpoint does not exist or was never committed."""


class CorruptCheckpointError(FlashCkptError, ValueError):
    """Stored bytes differ from the written ones: truncated, flipped, swapped or foreign."""


class RenamedCheckpointError(CorruptCheckpointError):
    """The directory of an undamaged checkpoint has the name of another iteration."""


class FormatVersionError(FlashCkptError, ValueError):
    """The checkpoint is of a format that another release of this package reads."""


class AgentError(FlashCkptError, ConnectionError):
    """The node's agent is gone, cannot be started, or does not answer."""


class AgentRefusedError(AgentError):
    """The node's agent refused one request. It keeps all slots that it had before."""


class OtherWriterError(FlashCkptError):
    """Another job writes to the save directory, so this job does not start."""


class SaveFailedError(FlashCkptError):
    """A checkpoint that was staged could not be made durable."""


def is_damage(error: BaseException) -> bool:
    """Return whether `error` means that a checkpoint is damaged, so that an older one may load.

    An older checkpoint does not help against faults of the job (another model, no permission, an
    older release), or while storage is unavailable. Reads retry before they raise
    (`storage.retrying_store`).
    """
    if isinstance(error, StorageError):
        return class_of(error).kind in ("damage", "gone")
    return isinstance(error, CorruptCheckpointError | NotCommittedError)


def for_command(message: str) -> str:
    """Return `message` with Megatron's option replaced by that of the `flashckpt` command."""
    return message.replace(OLDER, "choose an older one with --iteration").replace(
        "--ckpt-step", "--iteration"
    )


def for_loop(message: str) -> str:
    """Return `message` with Megatron's options replaced by arguments of `Checkpointer`."""
    for option, argument in _OF_LOOP.items():
        message = re.sub(option, argument, message)
    return message


@contextlib.contextmanager
def in_words_of_loop() -> Iterator[None]:
    """Raise errors of this package with messages for a loop without Megatron's options."""
    try:
        yield
    except FlashCkptError as error:
        error.args = tuple(for_loop(arg) if isinstance(arg, str) else arg for arg in error.args)
        if isinstance(error, OSError) and error.strerror is not None:
            error.strerror = for_loop(error.strerror)
        raise


def for_listing(message: str) -> str:
    """Return `message` without advice on another iteration, as a listing shows all iterations."""
    for remedy in (f"; {OLDER}", f", or {OLDER}", f", or {ANOTHER}"):
        message = message.removesuffix(remedy)
    return message


def first_few(items: Sequence[object], separator: str = ", ", most: int = 8) -> str:
    """Return the first few of `items` and the number of further ones, for a message."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return separator.join(map(str, items[:most])) + more


def shown_error(error: Exception) -> str:
    """Return an error's message; add the type if the error is not this package's."""
    if isinstance(error, FlashCkptError):
        return str(error)
    return f"{type(error).__name__}: {error}"
