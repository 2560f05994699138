"""Read what torch.distributed.checkpoint wrote, without running what a pickle might hold.

`.metadata` is a pickle that torch itself loads without restrictions. Here only the few classes that
it is made of are let in.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import io
import pathlib
import pickle
from collections import OrderedDict
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner

from megatron_flashckpt.convert.common import safe_pickle
from megatron_flashckpt.errors import CorruptCheckpointError, UnsupportedError
from megatron_flashckpt.layout.piece import Shape

METADATA = ".metadata"
_ANOTHER = "convert another iteration"

#: Modules whose dataclasses and enums `.metadata` may hold.
_MODULES = {module.__name__: module for module in (metadata, planner, filesystem)} | {
    # Where torch 2.1 had TensorProperties.
    "torch.distributed._shard.sharded_tensor.metadata": metadata,
}
_OTHERS: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
}


class _Ignored:
    """Stands for Megatron's own subclasses, of which nothing but the attributes is used."""

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
            return _Ignored
        found = getattr(_MODULES.get(module), name, None)
        if isinstance(found, type) and (
            dataclasses.is_dataclass(found) or issubclass(found, enum.Enum)
        ):
            return found
        raise UnsupportedError(f"{module}.{name}")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor of the checkpoint, as it was written."""

    dtype: torch.dtype
    shape: Shape
    chunks: dict[Shape, Shape]
    """Shape of each chunk by its offset."""
    original_shape: Shape | None
    """Of a tensor that was cut into ranges (core 0.8 to 0.15): its shape before axes were replaced
    by numbers of boxes, and the contents of a box by one more axis."""


class Reader:
    """One directory; reads one chunk at a time."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        place = directory / METADATA
        try:
            with open(place, "rb") as file:
                found = _Unpickler(file).load()
            self._storage = {
                (index.fqn, None if index.offset is None else tuple(index.offset)): info
                for index, info in found.storage_data.items()
            }
            self._described = dict(found.state_dict_metadata)
            self._megatrons: dict[str, Any] = dict(getattr(found, "mcore_data", None) or {})
        except UnsupportedError as error:
            raise UnsupportedError(
                f"{place}: holds objects of {error}, which are not loaded because a pickle could "
                "run code through them; let the Megatron that wrote it load and save it again"
            ) from None
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
        found = {}
        for name, described in self._described.items():
            if isinstance(described, metadata.TensorStorageMetadata):
                original = self._megatrons.get(name, {}).get("nd_reformulated_orig_global_shape")
                found[name] = StoredTensor(
                    described.properties.dtype,
                    tuple(described.size),
                    {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in described.chunks},
                    None if original is None else tuple(original),
                )
        return found

    def objects(self) -> list[str]:
        """Return the names of all that is not a tensor."""
        return [
            name
            for name, described in self._described.items()
            if isinstance(described, metadata.BytesStorageMetadata)
        ]

    def object(self, name: str) -> Any:
        """Return what is stored as `name`, made of plain types."""
        return safe_pickle.load(io.BytesIO(self._bytes(name, None)), f"{self.directory}: {name}")

    def chunk(self, name: str, offset: Shape) -> torch.Tensor:
        """Return the chunk of a tensor that starts at `offset`."""
        where = f"{self.directory}: {name} at {offset}"
        found = safe_pickle.load(io.BytesIO(self._bytes(name, offset)), where)
        shape = self.tensors[name].chunks[offset]
        if not isinstance(found, torch.Tensor) or tuple(found.shape) != shape:
            raise CorruptCheckpointError(f"{where}: is not a tensor of shape {shape}; {_ANOTHER}")
        return found.contiguous()

    def _bytes(self, name: str, offset: Shape | None) -> bytes:
        try:
            info = self._storage[name, offset]
        except KeyError:
            raise CorruptCheckpointError(
                f"{self.directory}/{METADATA}: does not say where {name} at {offset} is; {_ANOTHER}"
            ) from None
        if getattr(info, "transform_descriptors", None):
            raise UnsupportedError(
                f"{self.directory}: {name} was written with extensions "
                f"{info.transform_descriptors}, which this release does not know; let Megatron "
                "load it and save it without them"
            )
        file = self.directory / info.relative_path
        if file.parent != self.directory:
            raise CorruptCheckpointError(
                f"{self.directory}/{METADATA}: names {file} outside of it; {_ANOTHER}"
            )
        try:
            with open(file, "rb") as stream:
                stream.seek(info.offset)
                found = stream.read(info.length)
        except FileNotFoundError:
            raise CorruptCheckpointError(f"{file}: is missing; {_ANOTHER}") from None
        if len(found) != info.length:
            raise CorruptCheckpointError(
                f"{file}: ends before {info.offset + info.length} bytes; {_ANOTHER}"
            )
        return found
