"""Safe loading of Megatron's pickles: classes that could run code are refused.

This is `torch.load(weights_only=True)` with the few classes in Megatron's checkpoints in addition
to tensors: namespaces, paths, signals, numpy arrays, enums of megatron.core.
"""

from __future__ import annotations

import argparse
import enum
import functools
import importlib
import io
import pathlib
import signal
import types
from collections.abc import Iterable
from typing import IO, Any

import numpy as np
import torch

from megatron_flashckpt.error_classes import may_pass
from megatron_flashckpt.errors import CorruptCheckpointError, UnsupportedError

_CLASSES: tuple[type, ...] = (
    argparse.Namespace,
    types.SimpleNamespace,
    pathlib.PosixPath,
    signal.Signals,
    io.BytesIO,
    np.ndarray,
    np.dtype,
    *(type(np.dtype(code)) for code in ("u1", "i4", "u4", "i8", "u8", "f4", "f8")),
)
#: Modules whose enums may be in a checkpoint; their import has no side effects.
_ENUM_MODULES = (
    "megatron.core.enums",
    "megatron.core.transformer.enums",
    "megatron.core.rerun_state_machine",
)


def load(
    file: str | pathlib.Path | IO[bytes], place: str, *, mmap: bool = False, device: str = "cpu"
) -> Any:
    """Load a file of `torch.save`.

    Args:
        place: name of the file, for messages.
        mmap: read tensors of the file when they are used.
        device: `cpu`, or `meta` for tensors without elements.

    Raises:
        UnsupportedError: the file holds objects of other classes; the message names them.
        CorruptCheckpointError: the file cannot be decoded.
        OSError: storage reports an error that may pass, so the bytes may be intact.
    """
    try:
        with torch.serialization.safe_globals(_allowed()):
            return torch.load(file, map_location=device, weights_only=True, mmap=mmap or None)
    except FileNotFoundError:
        raise
    except Exception as error:  # torch.load raises any error for broken bytes
        if may_pass(error):
            raise
        unknown = _unknown(file)
        if unknown:
            raise UnsupportedError(
                f"{place}: holds objects of {', '.join(unknown)}, which are not loaded because a "
                "pickle could run code through them; load the checkpoint with the Megatron that "
                "wrote it, and save it without them"
            ) from None
        raise CorruptCheckpointError(
            f"{place}: cannot be read ({type(error).__name__}); convert another iteration"
        ) from None


@functools.cache
def _allowed() -> list[Any]:
    # numpy 2 moved its modules; files name either.
    rebuild = np.zeros(1).__reduce__()[0]
    names = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
    return [*_CLASSES, *((rebuild, name) for name in names), *_enums()]


def _enums() -> Iterable[type[enum.Enum]]:
    for name in _ENUM_MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:  # an older Megatron, or none
            continue
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, enum.Enum):
                yield value


def _unknown(file: str | pathlib.Path | IO[bytes]) -> list[str]:
    """Return the refused classes in `file`; empty if the file is not a pickle."""
    try:
        if not isinstance(file, str | pathlib.Path):
            file.seek(0)
        with torch.serialization.safe_globals(_allowed()):
            return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except Exception:  # broken bytes, as above
        return []
