"""Formats of checkpoints: detection, and conversion from one format to another."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from megatron_flashckpt.catalog import foreign
from megatron_flashckpt.catalog.tracker import iteration_in, tracker_text
from megatron_flashckpt.convert.common.contents import Contents, GlobalTensor
from megatron_flashckpt.convert.common.damage_check import refuse_damage
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.convert.common.output_dir import RELEASE
from megatron_flashckpt.convert.common.overlap import refuse_overlap
from megatron_flashckpt.convert.readers.dlrover import is_dlrover, open_dlrover
from megatron_flashckpt.convert.readers.flashckpt import is_ours, open_ours
from megatron_flashckpt.convert.readers.hf import is_hf, open_hf
from megatron_flashckpt.convert.readers.legacy import is_legacy, open_legacy
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
from megatron_flashckpt.file_format.file_names import TRACKER, iteration_dir, parse_iteration_dir
from megatron_flashckpt.layout.piece import BUFFER, WEIGHT
from megatron_flashckpt.layout.reshard import Box
from megatron_flashckpt.megatron_lm.rebuild.legacy_gpt import is_legacy_gpt
from megatron_flashckpt.megatron_lm.side_state import MEGATRON_STATE
from megatron_flashckpt.storage.opening import open_store
from megatron_flashckpt.storage.retrying_store import RetryingStore, load_patience_s

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Source:
    """A format that can be read."""

    name: str
    recognises: Callable[[Path], bool]
    """Returns True for a checkpoint directory in this format."""
    open: Callable[[RetryingStore, Path, int, Options], Contents]
    """Returns the contents of a checkpoint, from its save directory, its own directory and its
    iteration (0 for a release)."""


def _with_retries(open_format: Callable[[Path, int, Options], Contents]) -> Any:
    """Return `Source.open` for a reader that uses no storage: reads are retried as a whole."""

    def open_with_retries(
        store: RetryingStore, directory: Path, iteration: int, options: Options
    ) -> Contents:
        contents = _retry(store, directory, lambda: open_format(directory, iteration, options))
        return dataclasses.replace(
            contents,
            tensors=[_retrying(tensor, store, directory) for tensor in contents.tensors],
            doubles=tuple(_retrying(tensor, store, directory) for tensor in contents.doubles),
        )

    return open_with_retries


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


#: Formats in the order of their detection: the first that recognises a directory is used.
SOURCES = (
    Source(
        "flashckpt",
        is_ours,
        lambda store, directory, iteration, options: open_ours(store, iteration, options),
    ),
    Source(
        "torch_dist",
        lambda directory: (directory / CONFIG).exists(),
        _with_retries(open_torch_dist),
    ),
    Source("dlrover", is_dlrover, _with_retries(open_dlrover)),
    Source("torch", is_legacy, _with_retries(open_legacy)),
)

#: Functions that write a checkpoint into a save directory (safetensors and hf: directly into DST).
DESTINATIONS: dict[str, Callable[[Contents, Path, Options], Path]] = {
    "flashckpt": write_ours,
    "torch_dist": write_torch_dist,
    "torch": write_legacy,
    "safetensors": write_safetensors,
    "hf": write_hf,
}


@dataclasses.dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint that is open for conversion."""

    format: str
    root: Path
    """The save directory."""
    directory: Path
    """The checkpoint's directory."""
    contents: Contents

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.contents.tensors)


def open_source(root: Path, iteration: int | None, options: Options) -> OpenCheckpoint:
    """Open a checkpoint of any known format.

    Args:
        root: a save directory.
        iteration: iteration to open; None for the one that the tracker names.

    Raises:
        NotCommittedError: no such checkpoint.
        FlashCkptError: the checkpoint cannot be converted; the message states the reason.
    """
    store = RetryingStore(open_store(root), total_s=load_patience_s())
    if _retry(store, root, lambda: is_hf(root)):
        if iteration is not None:
            raise ConfigError(f"{root}: is a Hugging Face model; leave out --iteration {iteration}")
        return OpenCheckpoint("hf", root, root, _with_retries(_open_hf)(store, root, 0, options))
    directory, number = _directory(store, root, iteration)
    for source in SOURCES:
        if _retry(store, directory, functools.partial(source.recognises, directory)):
            with _named_arguments(str(directory)):
                contents = source.open(store, directory, number, options)
            if not hasattr(contents.args, "__dict__"):
                raise CorruptCheckpointError(
                    f"{directory}: holds {contents.args!r} instead of training arguments; convert "
                    "another iteration"
                )
            if missing := [name for name in MEGATRON_STATE if name not in contents.common]:
                raise CorruptCheckpointError(
                    f"{directory}: its common state lacks {', '.join(missing)}; convert another "
                    "iteration"
                )
            return OpenCheckpoint(
                source.name,
                root,
                directory,
                _weights_only(contents) if options.weights_only else contents,
            )
    known = ", ".join(source.name for source in SOURCES)
    raise NotCommittedError(
        f"{directory}: holds no checkpoint in a format that can be converted ({known}); "
        "'flashckpt ls DIR' lists the checkpoints of a save directory"
    )


def _open_hf(directory: Path, iteration: int, options: Options) -> Contents:
    return open_hf(directory, options)


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
    refuse_overlap(opened.root, opened.directory, destination)
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


def _directory(store: RetryingStore, root: Path, iteration: int | None) -> tuple[Path, int]:
    if iteration is not None:
        if empty := foreign.dlrover_empty(store, iteration):
            raise NotCommittedError(empty)
        directory = root / iteration_dir(iteration)
        if not _retry(store, directory, directory.is_dir):
            raise NotCommittedError(
                f"{directory}: does not exist; 'flashckpt ls DIR' lists the checkpoints of a save "
                "directory"
            )
        return directory, iteration
    tracker = root / TRACKER
    iteration_of_root = parse_iteration_dir(root.absolute().name)
    if iteration_of_root is not None and not tracker.exists():
        raise NotCommittedError(
            f"{root}: is one checkpoint; give its save directory: "
            f"{root.absolute().parent} --iteration {iteration_of_root}"
        )
    text = tracker_text(store)
    if text is None:
        raise NotCommittedError(
            f"{tracker}: does not exist, so the iteration to convert is unknown; give Megatron's "
            "--save directory, or --iteration N"
        )
    if text == RELEASE:
        return root / RELEASE, 0
    number = iteration_in(text)
    if number is None:
        raise ConfigError(f"{tracker}: {text!r} is not an iteration; choose one with --iteration N")
    return _directory(store, root, number)


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
