"""Formats of checkpoints: detection, and conversion from one format to another."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch

from megatron_flashckpt.catalog import foreign, listing
from megatron_flashckpt.catalog.tracker import iteration_in, tracker_text
from megatron_flashckpt.convert.common.contents import Contents, GlobalTensor
from megatron_flashckpt.convert.common.damage_check import refuse_damage
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.common.overlap import refuse_overlap
from megatron_flashckpt.convert.readers.dlrover import open_dlrover
from megatron_flashckpt.convert.readers.flashckpt import is_ours, open_ours
from megatron_flashckpt.convert.readers.hf import is_hf, open_hf
from megatron_flashckpt.convert.readers.legacy import has_ranks, is_legacy, open_legacy
from megatron_flashckpt.convert.readers.torch_dist import CONFIG, open_torch_dist
from megatron_flashckpt.convert.writers.flashckpt import write_ours
from megatron_flashckpt.convert.writers.hf import write_hf
from megatron_flashckpt.convert.writers.legacy import write_legacy
from megatron_flashckpt.convert.writers.safetensors import write_safetensors
from megatron_flashckpt.convert.writers.torch_dist import write_torch_dist
from megatron_flashckpt.error_classes import class_of, may_pass
from megatron_flashckpt.errors import (
    ConfigError,
    CorruptCheckpointError,
    FlashCkptError,
    NotCommittedError,
    StorageError,
    UnsupportedError,
)
from megatron_flashckpt.file_format.file_names import RELEASE, TRACKER, iteration_dir
from megatron_flashckpt.layout.piece import BUFFER, WEIGHT
from megatron_flashckpt.layout.reshard import Box
from megatron_flashckpt.megatron_lm.rebuild.legacy_gpt import is_legacy_gpt
from megatron_flashckpt.megatron_lm.side_state import MEGATRON_STATE
from megatron_flashckpt.storage.opening import is_url
from megatron_flashckpt.storage.retrying_store import RetryingStore

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Source:
    """A format of another program, whose files only a file system can hold."""

    name: str
    recognises: Callable[[Path], bool]
    """Returns True for a checkpoint directory in this format."""
    open: Callable[[Path, int, Options], Contents]
    """Returns the contents of a checkpoint, from its own directory and its iteration (0 for a
    release)."""


def _open_with_retries(
    open_format: Callable[[Path, int, Options], Contents],
    store: RetryingStore,
    directory: Path,
    iteration: int,
    options: Options,
) -> Contents:
    """Return what `open_format`, which uses no store, reads; its reads are retried as a whole."""
    _retry(store, directory, lambda: _refuse_endless_files(directory))
    contents = _retry(store, directory, lambda: open_format(directory, iteration, options))
    return dataclasses.replace(
        contents,
        tensors=[_retrying(tensor, store, directory) for tensor in contents.tensors],
        doubles=tuple(_retrying(tensor, store, directory) for tensor in contents.doubles),
    )


def _refuse_endless_files(directory: Path) -> None:
    """Raise if a checkpoint has a pipe, socket or device: a reader would wait for its writer."""
    for path in directory.rglob("*"):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise CorruptCheckpointError(
                f"{path}: is no file, but a pipe, socket or device; restore the file from a copy, "
                "or convert another checkpoint"
            )


def _retrying(tensor: GlobalTensor, store: RetryingStore, directory: Path) -> GlobalTensor:
    """Return `tensor` with reads that are retried after transient errors."""

    def read(box: Box) -> torch.Tensor:
        return _retry(store, directory, lambda: tensor.read(box))

    return dataclasses.replace(tensor, read=read)


def _retry(store: RetryingStore, directory: Path, attempt: Callable[[], _T]) -> _T:
    """Return `attempt()`, a read in `directory`, repeated after errors that may pass.

    Raises:
        StorageError: the last attempt failed, too.
    """
    try:
        return store.with_retries(attempt)
    except OSError as error:
        if isinstance(error, FlashCkptError) or not may_pass(error):
            raise
        raise StorageError(
            error.errno,
            f"{error.filename or directory}: cannot read ({error.strerror}); "
            f"{class_of(error).remedy}",
        ) from error


#: Name of this package's format, which is also read from an object store.
OURS = "flashckpt"
#: Other formats in the order of their detection: the first that recognises a directory is used.
SOURCES = (
    Source("torch_dist", lambda directory: (directory / CONFIG).exists(), open_torch_dist),
    Source("dlrover", has_ranks, open_dlrover),
    Source("torch", is_legacy, open_legacy),
)

#: Functions that write a checkpoint into a save directory (safetensors and hf: directly into DST).
DESTINATIONS: dict[str, Callable[[Contents, Path, Options], Path]] = {
    OURS: write_ours,
    "torch_dist": write_torch_dist,
    "torch": write_legacy,
    "safetensors": write_safetensors,
    "hf": write_hf,
}


@dataclasses.dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint that is open for conversion."""

    format: str
    contents: Contents
    directories: tuple[Path, Path] | None
    """The save directory and the checkpoint's directory; None for a checkpoint in a bucket."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.contents.tensors)


def open_source(root: Path | str, iteration: int | None, options: Options) -> OpenCheckpoint:
    """Open a checkpoint of any known format.

    Args:
        root: a save directory, or its URL, where only checkpoints of this package are read.
        iteration: iteration to open; None for the one that the tracker names.

    Raises:
        NotCommittedError: no such checkpoint.
        FlashCkptError: the checkpoint cannot be converted; the message states the reason.
    """
    store = listing.save_directory(str(root))
    path = None if is_url(root) else Path(root)
    if path is not None and _retry(store, path, lambda: is_hf(path)):
        if iteration is not None:
            raise ConfigError(f"{root}: is a Hugging Face model; leave out --iteration {iteration}")
        contents = _open_with_retries(open_hf, store, path, 0, options)
        return OpenCheckpoint("hf", contents, (path, path))
    number = _tracked(store) if iteration is None else _existing(store, iteration)
    place = f"{root}/{iteration_dir(number)}"
    directories = None if path is None else (path, path / iteration_dir(number))
    with _named_arguments(place):
        name, contents = _opened(store, directories and directories[1], number, options)
    if not hasattr(contents.args, "__dict__"):
        raise CorruptCheckpointError(
            f"{place}: holds {contents.args!r} instead of training arguments; convert another "
            "iteration"
        )
    if missing := [name for name in MEGATRON_STATE if name not in contents.common]:
        raise CorruptCheckpointError(
            f"{place}: its common state lacks {', '.join(missing)}; convert another iteration"
        )
    if options.weights_only:
        contents = _weights_only(contents)
    return OpenCheckpoint(name, contents, directories)


def _opened(
    store: RetryingStore, directory: Path | None, iteration: int, options: Options
) -> tuple[str, Contents]:
    """Return format and contents of an iteration, or of `RELEASE`.

    Args:
        directory: None in a bucket.

    Raises:
        NotCommittedError: no format is recognised, or one that cannot be read from a bucket.
    """
    if is_ours(store, iteration):
        return OURS, open_ours(store, iteration, options)
    place = f"{store.place}/{iteration_dir(iteration)}"
    if directory is None:
        raise NotCommittedError(
            f"{place}: holds no committed checkpoint of megatron_flashckpt; copy a checkpoint of "
            "another program to a directory, and convert that"
        )
    for source in SOURCES:
        if _retry(store, directory, functools.partial(source.recognises, directory)):
            number = 0 if iteration == RELEASE else iteration
            return source.name, _open_with_retries(source.open, store, directory, number, options)
    known = ", ".join((OURS, *(source.name for source in SOURCES)))
    raise NotCommittedError(
        f"{place}: holds no checkpoint in a format that can be converted ({known}); "
        "'flashckpt ls DIR' lists the checkpoints of a save directory"
    )


def convert(
    opened: OpenCheckpoint,
    destination: Path,
    to: str,
    options: Options,
    on_read: Callable[[int], object] = lambda nbytes: None,
) -> Path:
    """Write `opened` in format `to`; return the directory of the result.

    Args:
        on_read: called with the number of bytes that were just read from the source.

    Raises:
        ConfigError: the result would replace other files, or overlap the source.
        CorruptCheckpointError: the source's optimizer state does not match its weights.
        UnsupportedError: a job with this model could not load the result.
    """
    if opened.directories is not None:
        refuse_overlap(*opened.directories, destination)
    contents = opened.contents
    if to == "torch_dist" and is_legacy_gpt(contents.args):
        raise UnsupportedError(
            f"{contents.place}: is a checkpoint of Megatron's legacy GPT, whose jobs cannot load "
            "torch_dist; convert it with --to torch"
        )
    if contents.suspicion is not None and contents.optimizer and not options.accept_damage:
        refuse_damage(contents)
    counted = [_counted(tensor, on_read) for tensor in contents.tensors]
    with _named_arguments(contents.place):
        return DESTINATIONS[to](
            dataclasses.replace(contents, tensors=counted), destination, options
        )


@contextlib.contextmanager
def _named_arguments(place: str) -> Iterator[None]:
    """Raise UnsupportedError if the context needs a training argument that is missing.

    The required arguments depend on both formats and on the model.
    """
    try:
        yield
    except AttributeError as error:
        if not isinstance(error.obj, argparse.Namespace | types.SimpleNamespace):
            raise
        raise UnsupportedError(
            f"{place}: its training arguments lack '{error.name}', which this conversion needs; "
            "convert to another format, or let Megatron itself load and save it "
            "(--ckpt-convert-format torch_dist --ckpt-convert-save DIR)"
        ) from error


def _existing(store: RetryingStore, iteration: int) -> int:
    """Return `iteration`, which has a directory."""
    if empty := foreign.dlrover_empty(store, iteration):
        raise NotCommittedError(empty)
    directory = iteration_dir(iteration)
    if store.stat(directory) is None:
        raise NotCommittedError(
            f"{store.place}/{directory}: does not exist; 'flashckpt ls DIR' lists the checkpoints "
            "of a save directory"
        )
    return iteration


def _tracked(store: RetryingStore) -> int:
    """Return the iteration that the tracker names, or `RELEASE`."""
    tracker = f"{store.place}/{TRACKER}"
    text = tracker_text(store)
    if text is None:
        raise NotCommittedError(
            f"{tracker}: does not exist, so the iteration to convert is unknown; give Megatron's "
            "--save directory, or --iteration N"
        )
    if text == iteration_dir(RELEASE):
        return RELEASE
    number = iteration_in(text)
    if number is None:
        raise ConfigError(f"{tracker}: {text!r} is not an iteration; choose one with --iteration N")
    return _existing(store, number)


def _weights_only(contents: Contents) -> Contents:
    return dataclasses.replace(
        contents,
        tensors=[tensor for tensor in contents.tensors if tensor.kind in (WEIGHT, BUFFER)],
        common={**contents.common, "opt_param_scheduler": None},
        optimizer=None,
        rng={},
    )


def _counted(tensor: GlobalTensor, on_read: Callable[[int], object]) -> GlobalTensor:
    def read(box: Box) -> torch.Tensor:
        tensor_data = tensor.read(box)
        on_read(tensor_data.nbytes)
        return tensor_data

    return dataclasses.replace(tensor, read=read)
