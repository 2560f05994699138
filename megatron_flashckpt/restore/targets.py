"""Where restored bytes go."""

from __future__ import annotations

import torch


class Targets:
    """The flat tensors that wanted pieces stand for, written by byte ranges.

    Byte ranges need not fall on element borders. Several threads may write different ranges.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._bytes = [tensor.view(torch.uint8) for tensor in tensors]

    def write(self, index: int, offset: int, source: torch.Tensor) -> None:
        """Put the bytes `source` (a flat uint8 tensor) at `offset` of tensor `index`."""
        self._bytes[index][offset : offset + source.numel()].copy_(source)

    def write_bytes(self, index: int, offset: int, source: memoryview) -> None:
        """Put `source`, which must be writable memory, at `offset` of tensor `index`."""
        self.write(index, offset, torch.frombuffer(source, dtype=torch.uint8))
