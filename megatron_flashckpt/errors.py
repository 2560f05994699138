"""Everything that can go wrong, as one small tree.

Each message states the fact, the place and the remedy, and lists all offenders at once. An
error that is also a standard one inherits it, so that `except FileNotFoundError` keeps working.
"""

from __future__ import annotations

from megatron_flashckpt.error_classes import class_of

#: The remedy for a damaged checkpoint, for whoever starts a training job.
OLDER = "load an older iteration with --ckpt-step"
#: The remedy where the wanted checkpoint is not there, or is that of another model.
ANOTHER = "choose another iteration with --ckpt-step"


class FlashCkptError(Exception):
    """Base of every error that this package raises on purpose."""

    repeats = False
    """Whether it happened on another rank, which the message names."""


class ConfigError(FlashCkptError, ValueError):
    """A setting (file, environment variable, argument) is unknown or does not make sense."""


class UnsupportedError(FlashCkptError, NotImplementedError):
    """The training job uses something that this package cannot checkpoint (yet)."""


class LayoutError(FlashCkptError, ValueError):
    """Pieces contradict each other: overlapping, out of bounds, or of unknown type."""


class MissingStateError(FlashCkptError, KeyError):
    """A checkpoint does not hold what the model needs; the message names every key."""

    differences: tuple[str, ...] = ()
    """One line per key, where they were found key by key."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0]) if self.args else ""


class StorageError(FlashCkptError, OSError):
    """Storage refused an operation: full, read-only, permission, I/O error."""


class NotCommittedError(FlashCkptError, FileNotFoundError):
    """The wanted checkpoint does not exist or was never committed."""


class CorruptCheckpointError(FlashCkptError, ValueError):
    """Stored bytes are not what was written: truncated, flipped, swapped or not ours."""


class FormatVersionError(FlashCkptError, ValueError):
    """The checkpoint was written by a newer release than this one can read."""


class AgentError(FlashCkptError, ConnectionError):
    """The node's agent is gone, cannot be started, or does not answer."""


class AgentRefusedError(AgentError):
    """The node's agent refused one request. It still has all that it was given before."""


class OtherWriterError(FlashCkptError):
    """Another job writes to the save directory, so this one does not start."""


class OvertakenError(StorageError):
    """A later run has taken over the save directory, so this one writes nothing there any more."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.strerror = message


class SaveFailedError(FlashCkptError):
    """A checkpoint that was staged could not be made durable."""


def is_damage(error: BaseException) -> bool:
    """Return whether a checkpoint is not (or no more) what was written, so that an older one helps.

    It does not against what is wrong with the job (another model, no permission, an older release),
    nor while storage is away. Who reads retries first what may pass (`storage.patient`).
    """
    if isinstance(error, StorageError):
        return class_of(error).kind in ("damage", "gone")
    return isinstance(error, CorruptCheckpointError | NotCommittedError)


def for_command(message: str) -> str:
    """Return a message with the option of `flashckpt` commands in the place of Megatron's."""
    return message.replace(OLDER, "choose an older one with --iteration").replace(
        "--ckpt-step", "--iteration"
    )


def for_listing(message: str) -> str:
    """Return a message without its advice on another iteration: a listing shows all of them."""
    return message.removesuffix(f"; {OLDER}").removesuffix(f", or {OLDER}")
