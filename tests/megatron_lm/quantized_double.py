"""CPU stand-ins for TransformerEngine's FP8 and FP4 weights (subclasses of `QuantizedTensor`).

The test machines have no TransformerEngine. The stand-ins follow the dispatch rules of its
`quantized_tensor.py`, `float8_tensor.py`, `mxfp8_tensor.py` and `nvfp4_tensor.py`, releases 1.x to
2.x, as far as checkpoints depend on them; `test_quantized_double.py` pins each rule.

- The class is a wrapper: it has a nominal dtype (bfloat16), and its bytes are in other tensors.
- `detach` and `.data` return another wrapper of the same bytes.
- `copy_` into a quantized tensor quantizes the source; `copy_` out of one dequantizes it.
- Every other operator, also a slice, runs on dequantized copies, so writes to a slice are lost.
- An operator that changes its arguments writes whole tensors back. Lists of tensors are written
  back only since 2025 (`writes_lists_back`).
- `float`, `bfloat16`, `half` and `cpu` return plain tensors; `expand_as(self)` stays quantized.
- Scaling in blocks (MXFP8, NVFP4) refuses views that change the last axis: there is no `view(-1)`.
- FP4 packs two neighbours of a row into a byte, and Megatron knows these bytes by name.
- Casting a shard of a master takes the largest magnitude of all shards, rounds to the nominal dtype
  first, and writes the bytes of this shard only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

_aten = torch.ops.aten
_FP8 = torch.float8_e4m3fn
_LARGEST = 448.0
BLOCK = 32


class _Identity(torch.autograd.Function):
    """Adds an autograd node to a parameter, in which DDP finds the accumulator of gradients."""

    @staticmethod
    def forward(_: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class QuantizedDouble(torch.Tensor):
    """An FP8 tensor with one scale, computed from its largest magnitude (`Float8Tensor`)."""

    raw: torch.Tensor
    """The FP8 bytes, as uint8, in the shape of the tensor."""
    scale_inv: torch.Tensor
    """Factor by which FP8 values are multiplied."""
    writes_lists_back = True
    dequantizations = 0
    """Number of dequantizations of tensors of these classes."""

    @staticmethod
    def __new__(
        cls, raw: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype = torch.bfloat16
    ) -> QuantizedDouble:
        shape = cls.shape_of(raw)
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=raw.device)
        made.raw, made.scale_inv = raw, scale_inv
        return made

    @classmethod
    def of(cls, values: torch.Tensor) -> QuantizedDouble:
        """Return `values`, quantized."""
        return cls.zeros(values.shape).quantize_(values.detach())

    @classmethod
    def zeros(cls, shape: torch.Size) -> QuantizedDouble:
        """Return a tensor of that shape, its bytes zero."""
        return cls(torch.zeros(cls.raw_shape(shape), dtype=torch.uint8), cls.no_scale(shape))

    @staticmethod
    def no_scale(shape: torch.Size) -> torch.Tensor:
        return torch.ones(1)

    @staticmethod
    def raw_shape(shape: torch.Size) -> tuple[int, ...]:
        return tuple(shape)

    @staticmethod
    def shape_of(raw: torch.Tensor) -> tuple[int, ...]:
        return tuple(raw.shape)

    def quantize_(self, values: torch.Tensor) -> QuantizedDouble:
        self._set_scale(values.float().abs().max())
        self._store(values.float().reshape(-1), 0)
        return self

    def _set_scale(self, largest: torch.Tensor) -> None:
        self.scale_inv.copy_(_scale_inv(largest))

    def _store(self, values: torch.Tensor, start: int) -> None:
        self.raw.view(-1)[start : start + values.numel()] = _to_fp8(values, self.scale_inv)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        QuantizedDouble.dequantizations += 1
        return (self.raw.view(_FP8).float() * self.scale_inv).to(dtype or self.dtype)

    def quantize_shard(
        self, master: torch.Tensor | None, start: int | None, group: Any = None
    ) -> None:
        """Quantize elements `[start, start + len(master))`; `group` quantizes the rest.

        Args:
            master: fp32 elements; None if this rank has no elements of this tensor.
        """
        rounded = None if master is None else master.to(self.dtype).float()
        largest = torch.zeros(1) if rounded is None else rounded.abs().max().view(1)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group)
        self._set_scale(largest)
        if rounded is not None and start is not None:
            self._store(rounded, start)

    def alias(self, raw: torch.Tensor | None = None) -> QuantizedDouble:
        """Return another wrapper of the same bytes."""
        return type(self)(self.raw if raw is None else raw, self.scale_inv, self.dtype)

    def viewed(self, shape: list[int]) -> QuantizedDouble:
        return self.alias(self.raw.view(shape))

    def detach(self) -> QuantizedDouble:
        return self.alias()

    def float(self) -> torch.Tensor:
        return self.dequantize(torch.float32)

    def bfloat16(self) -> torch.Tensor:
        return self.dequantize(torch.bfloat16)

    def half(self) -> torch.Tensor:
        return self.dequantize(torch.float16)

    def cpu(self) -> torch.Tensor:
        return self.dequantize()

    def type(self) -> str:
        return torch.empty(0, dtype=self.dtype).type()

    def expand_as(self, other: torch.Tensor) -> torch.Tensor:
        return _Identity.apply(self) if other is self else super().expand_as(other)

    def __repr__(self, **_: Any) -> str:
        return f"{type(self).__name__}({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten.detach.default:
            return args[0].alias()
        if func is _aten.copy_.default:
            return _copy(*args[:2])
        if func is _aten.view.default:
            return args[0].viewed(args[1])
        plain_args, plain_kwargs = tree_map(_plain, args), tree_map(_plain, kwargs)
        out = func(*plain_args, **plain_kwargs)
        if not func._schema.is_mutable:
            return out
        for argument, plain, schema in zip(args, plain_args, func._schema.arguments, strict=False):
            if schema.alias_info is not None and schema.alias_info.is_write:
                cls._write_back(argument, plain)
        return None

    @classmethod
    def _write_back(cls, argument: Any, plain: Any) -> None:
        if isinstance(argument, QuantizedDouble):
            argument.quantize_(plain)
        elif isinstance(argument, list | tuple) and cls.writes_lists_back:
            for one, its_plain in zip(argument, plain, strict=True):
                cls._write_back(one, its_plain)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})


class BlockDouble(QuantizedDouble):
    """An FP8 tensor with a scale for every 32 elements of a row (`MXFP8Tensor`)."""

    @staticmethod
    def no_scale(shape: torch.Size) -> torch.Tensor:
        return torch.ones(*shape[:-1], shape[-1] // BLOCK, 1)

    def quantize_(self, values: torch.Tensor) -> QuantizedDouble:
        blocks = values.float().reshape(*self.shape[:-1], -1, BLOCK)
        self.scale_inv.copy_(_scale_inv(blocks.abs().amax(-1, keepdim=True)))
        self.raw.copy_(_to_fp8(blocks, self.scale_inv).view(self.shape))
        return self

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        QuantizedDouble.dequantizations += 1
        blocks = self.raw.view(_FP8).float().view(*self.shape[:-1], -1, BLOCK)
        return (blocks * self.scale_inv).view(self.shape).to(dtype or self.dtype)

    def viewed(self, shape: list[int]) -> QuantizedDouble:
        if len(shape) < 2 or shape[-1] != self.shape[-1]:
            raise ValueError(f"no view of size {tuple(shape)} of a {self!r}: blocks lie in rows")
        return self.alias(self.raw.view(shape))


class PackedDouble(QuantizedDouble):
    """An FP4 tensor, two values in a byte; one scale instead of NVFP4's many (`NVFP4Tensor`)."""

    @property
    def _rowwise_data(self) -> torch.Tensor:
        """The bytes, under the name that Megatron uses to move them into its buffer."""
        return self.raw

    @_rowwise_data.setter
    def _rowwise_data(self, raw: torch.Tensor) -> None:
        self.raw = raw

    @staticmethod
    def raw_shape(shape: torch.Size) -> tuple[int, ...]:
        return (*shape[:-1], shape[-1] // 2)

    @staticmethod
    def shape_of(raw: torch.Tensor) -> tuple[int, ...]:
        return (*raw.shape[:-1], raw.shape[-1] * 2)

    def _set_scale(self, largest: torch.Tensor) -> None:
        self.scale_inv.copy_(torch.where(largest > 0, largest / 7, torch.ones_like(largest)))

    def _codes(self) -> torch.Tensor:
        """Return a flat tensor with one 4-bit code per byte; code 8 means zero."""
        flat = self.raw.reshape(-1)
        return torch.stack([flat & 15, flat >> 4], -1).view(-1)

    def _store(self, values: torch.Tensor, start: int) -> None:
        codes = self._codes()
        made = (values / self.scale_inv).round().clamp(-7, 7) + 8
        codes[start : start + values.numel()] = made.to(torch.uint8)
        self.raw.copy_((codes[::2] | codes[1::2] << 4).view(self.raw.shape))

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        QuantizedDouble.dequantizations += 1
        values = (self._codes().float() - 8) * self.scale_inv
        return values.view(self.shape).to(dtype or self.dtype)

    def viewed(self, shape: list[int]) -> QuantizedDouble:
        if len(shape) < 2 or shape[-1] != self.shape[-1]:
            raise ValueError(f"no view of size {tuple(shape)} of a {self!r}: blocks lie in rows")
        return self.alias(self.raw.view(self.raw_shape(torch.Size(shape))))


def _plain(argument: Any) -> Any:
    return argument.dequantize() if isinstance(argument, QuantizedDouble) else argument


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if isinstance(target, QuantizedDouble):
        target.quantize_(_plain(source))
    else:
        target.copy_(_plain(source))


def _scale_inv(largest: torch.Tensor) -> torch.Tensor:
    return torch.where(largest > 0, largest / _LARGEST, torch.ones_like(largest))


def _to_fp8(values: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    return (values.float() / scale_inv).clamp(-_LARGEST, _LARGEST).to(_FP8).view(torch.uint8)
