"""State that every system saves: that of one rank of a mixed-precision Megatron job.

It holds 16-bit weights, fp32 masters and both Adam moments of a decoder. All tensors are sharded
along their first dimension (tensor parallel), so every rank holds different bytes. The tensors lie
in one mapping, which represents device memory: forked children do not inherit it. A copy out of the
mapping represents a copy from the device.
"""

from __future__ import annotations

import mmap

import torch

KINDS = {
    "weight": torch.bfloat16,
    "master": torch.float32,
    "exp_avg": torch.float32,
    "exp_avg_sq": torch.float32,
}
#: Bytes of one parameter in all kinds.
_PARAMETER_NBYTES = sum(dtype.itemsize for dtype in KINDS.values())
#: Alignment of tensors, for vector instructions.
_ALIGNMENT = 64
#: Number of tensors in one layer, and outside the layers.
_PER_LAYER, _BESIDE = 12, 2


def mapping(nbytes: int) -> mmap.mmap:
    """Return zeroed, mapped memory that forked children do not inherit."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    as_bytes(memory).zero_()
    return memory


def as_bytes(memory: mmap.mmap) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


def layers_of(pieces: int) -> int:
    """Return the number of layers that have about `pieces` tensors in all kinds."""
    return max(1, round((pieces / len(KINDS) - _BESIDE) / _PER_LAYER))


def hidden_of(nbytes: int, layers: int) -> int:
    """Return the hidden size at which the state of `layers` layers has about `nbytes` bytes."""
    return max(8, round((nbytes / _PARAMETER_NBYTES / layers / 12) ** 0.5 / 8) * 8)


def shapes(layers: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of this rank's part of every parameter, by name."""
    result: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        prefix = f"decoder.layers.{layer}."
        result |= {
            f"{prefix}ln1.weight": (hidden,),
            f"{prefix}ln1.bias": (hidden,),
            f"{prefix}qkv.weight": (3 * hidden, hidden),
            f"{prefix}qkv.bias": (3 * hidden,),
            f"{prefix}proj.weight": (hidden, hidden),
            f"{prefix}proj.bias": (hidden,),
            f"{prefix}ln2.weight": (hidden,),
            f"{prefix}ln2.bias": (hidden,),
            f"{prefix}fc1.weight": (4 * hidden, hidden),
            f"{prefix}fc1.bias": (4 * hidden,),
            f"{prefix}fc2.weight": (hidden, 4 * hidden),
            f"{prefix}fc2.bias": (hidden,),
        }
    return result | {"final_ln.weight": (hidden,), "final_ln.bias": (hidden,)}


class State:
    """One rank's tensors, by `<kind>/<parameter>`.

    Args:
        nbytes: approximate size, which determines the hidden size.
        pieces: approximate number of tensors, which determines the number of layers.
    """

    def __init__(self, nbytes: int, pieces: int, rank: int) -> None:
        self.rank = rank
        layers = layers_of(pieces)
        self.shapes = shapes(layers, hidden_of(nbytes, layers))
        self._places = places = {}
        end = 0
        for kind, dtype in KINDS.items():
            for name, shape in self.shapes.items():
                numel = torch.Size(shape).numel()
                places[f"{kind}/{name}"] = (dtype, end, numel, shape)
                end += -(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        memory = mapping(end)
        self.memory = as_bytes(memory)
        # Every tensor has its own storage, because some systems save whole storages.
        self.tensors = {
            name: torch.frombuffer(memory, dtype=dtype, offset=at, count=numel).view(shape)
            for name, (dtype, at, numel, shape) in places.items()
        }
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())

    def like(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return tensors in `memory`, flat bytes, with the layout of the state's own memory."""
        return [
            memory[at : at + numel * dtype.itemsize].view(dtype).view(shape)
            for dtype, at, numel, shape in self._places.values()
        ]

    def of(self, kind: str) -> dict[str, torch.Tensor]:
        return {name: self.tensors[f"{kind}/{name}"] for name in self.shapes}

    def fill(self) -> None:
        """Fill every tensor with the contents that `wrong` expects."""
        for number, tensor in enumerate(self.tensors.values()):
            tensor.copy_(self._content(number, tensor))

    def tag(self, step: int) -> None:
        """Write `step` into the first and the last element of every tensor."""
        for tensor in self.tensors.values():
            flat = tensor.view(-1)
            flat[0] = flat[-1] = step % 256  # bfloat16 represents these integers exactly

    def wrong(self, step: int) -> list[str]:
        """Return the names of tensors whose contents differ from those of `step`."""
        names = []
        for number, (name, tensor) in enumerate(self.tensors.items()):
            expected = self._content(number, tensor).view(-1)
            expected[0] = expected[-1] = step % 256
            if not torch.equal(expected, tensor.view(-1)):
                names.append(name)
        return names

    def _content(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.rank * 1_000_000 + number)
        return torch.empty_like(tensor).uniform_(-1, 1, generator=generator)
