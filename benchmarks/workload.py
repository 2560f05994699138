"""The state that every system saves: that of one rank of a mixed-precision Megatron job.

16-bit weights, fp32 masters and both Adam moments of a decoder, each cut along its first dimension
over the ranks (tensor parallel), so that every rank holds other bytes. The tensors lie in one
mapping that forked children do not inherit: it stands for device memory, of which a fork gets no
copy-on-write image either. Copying out of it is what copying from the device is on a GPU.
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
#: So that a tensor begins where vector instructions like it.
_ALIGNMENT = 64
#: Tensors of one layer, and beside the layers.
_PER_LAYER, _BESIDE = 12, 2


def mapping(nbytes: int) -> mmap.mmap:
    """Return zeroed memory, present already, that forked children do not inherit."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    as_bytes(memory).zero_()
    return memory


def as_bytes(memory: mmap.mmap) -> torch.Tensor:
    """Return a flat tensor of all bytes of `memory`."""
    return torch.frombuffer(memory, dtype=torch.uint8)


def layers_of(pieces: int) -> int:
    """Return how many layers give about so many tensors in all kinds."""
    return max(1, round((pieces / len(KINDS) - _BESIDE) / _PER_LAYER))


def hidden_of(nbytes: int, layers: int) -> int:
    """Return the hidden size at which the state of so many layers takes about `nbytes`."""
    return max(8, round((nbytes / _PARAMETER_NBYTES / layers / 12) ** 0.5 / 8) * 8)


def shapes(layers: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return this rank's part of every parameter by name."""
    found: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        prefix = f"decoder.layers.{layer}."
        found |= {
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
    return found | {"final_ln.weight": (hidden,), "final_ln.bias": (hidden,)}


class State:
    """One rank's tensors, by `<kind>/<parameter>`.

    Args:
        nbytes: about how much; the hidden size follows.
        pieces: about how many tensors; the number of layers follows.
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
        # Each with a storage of its own: some systems save whole storages.
        self.tensors = {
            name: torch.frombuffer(memory, dtype=dtype, offset=at, count=numel).view(shape)
            for name, (dtype, at, numel, shape) in places.items()
        }
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())

    def like(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return tensors that lie in `memory`, flat bytes, as those of the state lie in its own."""
        return [
            memory[at : at + numel * dtype.itemsize].view(dtype).view(shape)
            for dtype, at, numel, shape in self._places.values()
        ]

    def of(self, kind: str) -> dict[str, torch.Tensor]:
        """Return the tensors of one kind by parameter."""
        return {name: self.tensors[f"{kind}/{name}"] for name in self.shapes}

    def fill(self) -> None:
        """Give every tensor the contents that `wrong` expects."""
        for number, tensor in enumerate(self.tensors.values()):
            tensor.copy_(self._content(number, tensor))

    def tag(self, step: int) -> None:
        """Make the state that of `step`: the first and the last element of every tensor say so."""
        for tensor in self.tensors.values():
            flat = tensor.view(-1)
            flat[0] = flat[-1] = step % 256  # what bfloat16 still tells apart

    def wrong(self, step: int) -> list[str]:
        """Return the tensors that are not those of `step`."""
        found = []
        for number, (name, tensor) in enumerate(self.tensors.items()):
            expected = self._content(number, tensor).view(-1)
            expected[0] = expected[-1] = step % 256
            if not torch.equal(expected, tensor.view(-1)):
                found.append(name)
        return found

    def _content(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.rank * 1_000_000 + number)
        return torch.empty_like(tensor).uniform_(-1, 1, generator=generator)
