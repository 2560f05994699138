"""Reader of torch.distributed.checkpoint directories that runs no code from pickles.

`.metadata` is a pickle, which torch itself loads without restrictions. This reader allows only the
few classes that belong there.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import io
import pathlib
import pickle
import re
import struct
import zipfile
from collections import OrderedDict
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner

from megatron_flashckpt.convert.common import safe_pickle
from megatron_flashckpt.errors import CorruptCheckpointError, UnsupportedError
from megatron_flashckpt.layout.piece import Shape

METADATA = ".metadata"
_ANOTHER = "convert another iteration"

#: Name of a tensor's elements in the archive that `torch.save` writes.
_STORAGE = re.compile(r"[^/]+/data/\d+")
#: Header of an archive's entry, up to the lengths of the name and the field that follow it.
_LOCAL_HEADER = struct.Struct("<26xHH")
#: Modules whose dataclasses and enums `.metadata` may hold.
_MODULES = {module.__name__: module for module in (metadata, planner, filesystem)} | {
    # Module of TensorProperties in torch 2.1.
    "torch.distributed._shard.sharded_tensor.metadata": metadata,
}
_OTHERS: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
}


class _IgnoredClass:
    """Stand-in for Megatron's own subclasses, of which only the attributes are used."""

    mcore_data: dict[str, Any]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _OTHERS:
            return _OTHERS[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == "megatron.core.dist_checkpointing.strategies.torch" and name in (
            "MCoreMetadata",
            "MCoreSavePlan",
        ):
            return _IgnoredClass
        attribute = getattr(_MODULES.get(module), name, None)
        if isinstance(attribute, type) and (
            dataclasses.is_dataclass(attribute) or issubclass(attribute, enum.Enum)
        ):
            return attribute
        raise UnsupportedError(f"{module}.{name}")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Tensor of the checkpoint, as stored."""

    dtype: torch.dtype
    shape: Shape
    chunks: dict[Shape, Shape]
    """Shape of each chunk by its offset."""
    original_shape: Shape | None
    """Shape of a tensor that is stored as flattened ranges (core 0.8 to 0.15); None for others.
    Its stored shape has the numbers of boxes as axes, and one more axis for the box contents."""


class Reader:
    """Reader of one directory; reads one chunk at a time."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self._data_positions: dict[tuple[str, Shape], int | None] = {}
        """Results of `_data_position`."""
        place = directory / METADATA
        try:
            with open(place, "rb") as file:
                loaded = _Unpickler(file).load()
            self._storage = {
                (index.fqn, None if index.offset is None else tuple(index.offset)): info
                for index, info in loaded.storage_data.items()
            }
            self._described = dict(loaded.state_dict_metadata)
            self._megatrons: dict[str, Any] = dict(getattr(loaded, "mcore_data", None) or {})
        except UnsupportedError as error:
            raise UnsupportedError(
                f"{place}: holds objects of {error}, which are not loaded because a pickle could "
                "run code through them; load and save the checkpoint with the Megatron that wrote "
                "it"
            ) from None
        except FileNotFoundError:
            raise CorruptCheckpointError(f"{place}: is missing; {_ANOTHER}") from None
        except IsADirectoryError:
            raise CorruptCheckpointError(f"{place}: is a directory; {_ANOTHER}") from None
        except OSError:
            raise
        except Exception as error:  # a damaged pickle raises anything
            raise CorruptCheckpointError(
                f"{place}: cannot be read ({type(error).__name__}: {error}); convert another "
                "iteration"
            ) from error

    @functools.cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """All tensors by name."""
        result = {}
        for name, described in self._described.items():
            if isinstance(described, metadata.TensorStorageMetadata):
                original = self._megatrons.get(name, {}).get("nd_reformulated_orig_global_shape")
                result[name] = StoredTensor(
                    described.properties.dtype,
                    tuple(described.size),
                    {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in described.chunks},
                    None if original is None else tuple(original),
                )
        return result

    def objects(self) -> list[str]:
        """Return the names of all objects that are not tensors."""
        return [
            name
            for name, described in self._described.items()
            if isinstance(described, metadata.BytesStorageMetadata)
        ]

    def object(self, name: str) -> Any:
        """Return the object `name`, which consists of allowed types."""
        return safe_pickle.load(io.BytesIO(self._bytes(name, None)), f"{self.directory}: {name}")

    def chunk(self, name: str, offset: Shape) -> torch.Tensor:
        """Return the chunk of a tensor that starts at `offset`."""
        where = f"{self.directory}: {name} at {offset}"
        tensor = safe_pickle.load(io.BytesIO(self._bytes(name, offset)), where)
        shape = self.tensors[name].chunks[offset]
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != shape:
            raise CorruptCheckpointError(f"{where}: is not a tensor of shape {shape}; {_ANOTHER}")
        return tensor.contiguous()

    def elements(self, name: str, offset: Shape, low: int, high: int) -> torch.Tensor:
        """Return elements `[low, high)` of the flattened chunk of a tensor, and read no others.

        A rank's chunk of a bucket holds many parameters, and may be as large as the rank's memory.
        """
        if (name, offset) not in self._data_positions:
            self._data_positions[name, offset] = self._data_position(name, offset)
        position = self._data_positions[name, offset]
        if position is None:
            return self.chunk(name, offset).reshape(-1)[low:high]
        file, _ = self._place(name, offset)
        dtype = self.tensors[name].dtype
        begin, end = position + low * dtype.itemsize, position + high * dtype.itemsize
        return torch.frombuffer(bytearray(self._content(file, begin, end - begin)), dtype=dtype)

    def _data_position(self, name: str, offset: Shape) -> int | None:
        """Return the position of a chunk's first element in its file.

        None if the elements do not lie there as they are, row by row.
        """
        file, info = self._place(name, offset)
        where = f"{self.directory}: {name} at {offset}"
        with open(file, "rb") as stream, io.BufferedReader(_Window(stream, info)) as window:
            tensor = safe_pickle.load(window, where, device="meta")
            stored = self.tensors[name]
            if (
                not isinstance(tensor, torch.Tensor)
                or (tensor.dtype, tuple(tensor.shape)) != (stored.dtype, stored.chunks[offset])
                or not tensor.is_contiguous()
            ):
                return None
            try:
                with zipfile.ZipFile(window) as archive:
                    entries = [e for e in archive.infolist() if _STORAGE.fullmatch(e.filename)]
            except zipfile.BadZipFile:  # a form of old releases of torch
                return None
            if len(entries) != 1 or entries[0].compress_type != zipfile.ZIP_STORED:
                return None
            window.seek(entries[0].header_offset)
            header = window.read(_LOCAL_HEADER.size)
        name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack(header)
        begin = entries[0].header_offset + _LOCAL_HEADER.size + name_nbytes + extra_nbytes
        return int(info.offset + begin + tensor.storage_offset() * tensor.itemsize)

    def _bytes(self, name: str, offset: Shape | None) -> bytes:
        file, info = self._place(name, offset)
        return self._content(file, info.offset, info.length)

    def _place(self, name: str, offset: Shape | None) -> tuple[pathlib.Path, Any]:
        """Return the file of a chunk or object, and the place in it."""
        try:
            info = self._storage[name, offset]
        except KeyError:
            raise CorruptCheckpointError(
                f"{self.directory}/{METADATA}: lacks the position of {name} at {offset}; {_ANOTHER}"
            ) from None
        if getattr(info, "transform_descriptors", None):
            raise UnsupportedError(
                f"{self.directory}: {name} was written with extensions "
                f"{info.transform_descriptors}, which this release does not know; load and save "
                "the checkpoint with Megatron without them"
            )
        file = self.directory / info.relative_path
        if file.parent != self.directory:
            raise CorruptCheckpointError(
                f"{self.directory}/{METADATA}: names {file} outside of it; {_ANOTHER}"
            )
        if not file.exists():
            raise CorruptCheckpointError(f"{file}: is missing; {_ANOTHER}")
        return file, info

    def _content(self, file: pathlib.Path, position: int, nbytes: int) -> bytes:
        with open(file, "rb") as stream:
            stream.seek(position)
            content = stream.read(nbytes)
        if len(content) != nbytes:
            raise CorruptCheckpointError(
                f"{file}: ends before {position + nbytes} bytes; {_ANOTHER}"
            )
        return content


class _Window(io.RawIOBase):
    """The part of an open file that holds one chunk, as a file of its own."""

    def __init__(self, stream: io.BufferedReader, info: Any) -> None:
        self._stream = stream
        self._begin = info.offset
        self._nbytes = info.length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._nbytes}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(self._nbytes - self._position, 0)]
        self._stream.seek(self._begin + self._position)
        nbytes = self._stream.readinto(view)
        self._position += nbytes
        return nbytes
