"""Files of tensors by name, as the Hugging Face tools store them.

    model-00001-of-0000N.safetensors ...
    model.safetensors.index.json       {"metadata": {"total_size": N}, "weight_map": {name: file}}

Tensors are written part by part, so a tensor may be larger than memory. A model in one file has no
index, and the file is `model.safetensors`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from megatron_flashckpt.errors import (
    UNDECODABLE,
    CorruptCheckpointError,
    NotCommittedError,
    UnsupportedError,
)
from megatron_flashckpt.layout.piece import Shape
from megatron_flashckpt.megatron_lm.torch_dtypes import dtype_name, torch_dtype

INDEX = "model.safetensors.index.json"
_ONE_FILE = "model.safetensors"
#: Bytes of a file's header, at most: the limit of the safetensors library.
_MAX_HEADER_NBYTES = 100_000_000


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor that can be written."""

    name: str
    dtype: torch.dtype
    shape: Shape
    slabs: Callable[[], Iterator[torch.Tensor]]
    """Yields the elements in row-major order."""


class _Entry(msgspec.Struct, frozen=True):
    """A tensor in the header of a file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


_ENTRY = msgspec.json.Decoder(_Entry)
_INDEX = msgspec.json.Decoder(_Index)


@dataclasses.dataclass(frozen=True)
class StoredInFile:
    """A tensor in a file."""

    path: Path
    start: int
    """First byte in the file."""
    dtype: torch.dtype
    shape: Shape

    def read(self) -> torch.Tensor:
        """Return the tensor.

        Raises:
            CorruptCheckpointError: the file has become shorter.
        """
        data = bytearray(math.prod(self.shape) * self.dtype.itemsize)
        with open(self.path, "rb") as file:
            file.seek(self.start)
            if file.readinto(data) != len(data):
                raise _damaged(self.path, "ends inside a tensor")
        if not data:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(data, dtype=self.dtype).view(self.shape)


def tensors_in(directory: Path) -> dict[str, StoredInFile]:
    """Return the tensors of the model in `directory` by name; reads only headers.

    Raises:
        NotCommittedError: there are no weights in safetensors files.
        CorruptCheckpointError: a file is missing, or is not a safetensors file.
    """
    index = directory / INDEX
    files = [_ONE_FILE]
    if index.exists():
        try:
            weight_map = _INDEX.decode(index.read_bytes()).weight_map
        except UNDECODABLE as error:
            raise _damaged(index, f"is no list of files ({error})") from error
        files = sorted(set(weight_map.values()))
    elif not (directory / _ONE_FILE).exists():
        raise NotCommittedError(
            f"{directory}: has neither {INDEX} nor {_ONE_FILE}; save the model as safetensors "
            "files with transformers (save_pretrained)"
        )
    stored: dict[str, StoredInFile] = {}
    for name in files:
        if Path(name).name != name or not (directory / name).is_file():
            raise _damaged(index, f"names the file {name!r}, which is not in the directory")
        stored |= _in_file(directory / name)
    return stored


def _in_file(path: Path) -> dict[str, StoredInFile]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        nbytes = int.from_bytes(file.read(8), "little")
        if nbytes > min(size - 8, _MAX_HEADER_NBYTES):
            raise _damaged(path, "has no whole header")
        header = file.read(nbytes)
    result = {}
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        for name, encoded in entries.items():
            entry = _ENTRY.decode(encoded)
            start, end = entry.data_offsets
            dtype = torch_dtype(entry.dtype)
            if end - start != math.prod(entry.shape) * dtype.itemsize or start < 0:
                raise _damaged(path, f"has wrong bytes for {name}")
            if 8 + nbytes + end > size:
                raise _damaged(path, f"ends before {name} does")
            result[name] = StoredInFile(path, 8 + nbytes + start, dtype, entry.shape)
    except KeyError as error:
        raise UnsupportedError(
            f"{path}: has tensors of type {error}, which does not convert; save the model as "
            "bfloat16 with transformers"
        ) from error
    except UNDECODABLE as error:
        raise _damaged(path, f"has a header that cannot be read ({error})") from error
    return result


def _damaged(path: Path, fact: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{path}: {fact}; download or save the model again")


def write_files(directory: Path, tensors: Sequence[StoredTensor], limit_nbytes: int) -> None:
    """Write `tensors` in this order into files of `limit_nbytes`, the index last."""
    files = list(_files(tensors, limit_nbytes))
    weight_map = {}
    for number, file_tensors in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        _write(directory / file, file_tensors)
        weight_map.update({tensor.name: file for tensor in file_tensors})
    index = {"metadata": {"total_size": sum(map(_nbytes, tensors))}, "weight_map": weight_map}
    (directory / INDEX).write_bytes(msgspec.json.format(msgspec.json.encode(index), indent=2))


def _files(tensors: Sequence[StoredTensor], limit_nbytes: int) -> Iterator[list[StoredTensor]]:
    """Yield the tensors of each file; a tensor above the limit has a file of its own."""
    file_tensors: list[StoredTensor] = []
    free = limit_nbytes
    for tensor in tensors:
        nbytes = _nbytes(tensor)
        if file_tensors and nbytes > free:
            yield file_tensors
            file_tensors, free = [], limit_nbytes
        file_tensors.append(tensor)
        free -= nbytes
    if file_tensors:
        yield file_tensors


def _write(path: Path, tensors: list[StoredTensor]) -> None:
    # Wide elements first, so that every tensor is aligned, which torch needs for views.
    tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        end = position + _nbytes(tensor)
        entries[tensor.name] = {
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    header = msgspec.json.encode(entries)
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors:
            for part in tensor.slabs():
                file.write(part.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _nbytes(tensor: StoredTensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize
