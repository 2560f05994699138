"""Tensors of a simulated device: what is done with them is enqueued on the current stream.

Rules (`aten/src/ATen/native/cuda/Copy.cu`, CUDA Runtime API "API synchronization behavior"): an
operation runs on the calling thread's current stream of the *tensor's* device, whatever device
is current. A copy between host and device is asynchronous only if it is asked for with
`non_blocking` and the host memory is page-locked; it reads its source when it runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_flatten, tree_map

from tests.simulated_gpu.allocator import Block
from tests.simulated_gpu.node import Node, Stream, accelerator_error

aten = torch.ops.aten


class DeviceTensor(torch.Tensor):
    """A tensor on a simulated device. Its values are in `backing`, which only streams touch."""

    node: ClassVar[Node]
    backing: torch.Tensor
    block: Block
    index: int
    is_cuda = True  # type: ignore[assignment]
    is_cpu = False  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, backing: torch.Tensor, block: Block, index: int) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            backing.shape,
            strides=backing.stride(),
            storage_offset=backing.storage_offset(),
            dtype=backing.dtype,
        )
        made.backing, made.block, made.index = backing, block, index
        return made  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.index)

    @classmethod
    def allocate(cls, shape: Any, dtype: torch.dtype, index: int) -> DeviceTensor:
        """Return an uninitialized tensor: it holds what its memory held before."""
        like = torch.empty(shape, dtype=dtype, device="meta")
        if like.numel():  # torch asks the driver for memory in other modes during a capture
            cls.node.call("allocate", unsafe=not cls.node.is_capturing_here)
        block, memory = cls.node.devices[index].allocator.allocate(like.numel() * like.itemsize)
        return cls(memory.view(dtype).view(like.shape), block, index)

    @classmethod
    def put(cls, values: torch.Tensor, index: int) -> DeviceTensor:
        """Return a tensor that a kernel on the current stream of device `index` fills."""
        made = cls.allocate(values.shape, values.dtype, index)
        cls.node.current_stream(index).enqueue(_later(made.backing, values.clone()))
        return made

    def data_ptr(self) -> int:
        return self.backing.data_ptr()

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        self.block.awaited.append(stream.mark)

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        target = torch.empty(self.shape, dtype=self.dtype)
        return target.copy_(self)

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        wanted = kwargs.get("device", args[0] if args else None)
        if str(wanted) == "cpu":
            return self.cpu()
        raise NotImplementedError(f"to{args}: not simulated")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.copy_.default:
            _copy([(args[0], args[1])], _is_non_blocking(func, args, kwargs))
            return args[0]
        if func is aten._foreach_copy_.default:
            _copy(list(zip(args[0], args[1], strict=True)), _is_non_blocking(func, args, kwargs))
            return None
        if func is aten._local_scalar_dense.default:
            return args[0].cpu().item()
        if func.is_view or func is aten.detach.default:
            return _view(func, args, kwargs)
        return _kernel(cls.node, func, args, kwargs)


def _is_non_blocking(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking", False))


def _backing(value: Any) -> Any:
    return value.backing if isinstance(value, DeviceTensor) else value


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    base = args[0]
    made = func(base.backing, *args[1:], **kwargs)
    if isinstance(made, torch.Tensor):
        return DeviceTensor(made, base.block, base.index)
    return [DeviceTensor(view, base.block, base.index) for view in made]


def _kernel(node: Node, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Enqueue an operation; results are allocated at once and filled when it runs."""
    tensors = list(_tensors((args, kwargs)))
    (index, *others) = {tensor.index for tensor in tensors if isinstance(tensor, DeviceTensor)}
    on_host = [t for t in tensors if not isinstance(t, DeviceTensor) and t.dim() > 0]
    if others or on_host:
        raise RuntimeError(f"{func}: Expected all tensors to be on the same device")
    node.call(f"kernel {func}")
    if (latched := node.here.latched) is not None:
        node.here.latched = None
        raise accelerator_error(latched)
    raw_args, raw_kwargs = tree_map(_backing, (args, kwargs))
    if func._schema.is_mutable:
        node.current_stream(index).enqueue(lambda: func(*raw_args, **raw_kwargs))
        return None if not func._schema.returns else args[0]

    def on_meta(value: Any) -> Any:
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    shapes = func(*tree_map(on_meta, raw_args), **tree_map(on_meta, raw_kwargs))
    flat, _ = tree_flatten(shapes)
    results = [DeviceTensor.allocate(shape.shape, shape.dtype, index) for shape in flat]
    backings = [result.backing for result in results]

    def run() -> None:
        made, _ = tree_flatten(func(*raw_args, **raw_kwargs))
        for backing, value in zip(backings, made, strict=True):
            backing.copy_(value)

    node.current_stream(index).enqueue(run)
    return results[0] if isinstance(shapes, torch.Tensor) else results


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    flat, _ = tree_flatten(values)
    return (value for value in flat if isinstance(value, torch.Tensor))


def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]], non_blocking: bool) -> None:
    for target, source in pairs:
        if isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor):
            stream = DeviceTensor.node.current_stream(source.index)
            stream.enqueue(_later(target.backing, source.backing))
        elif isinstance(source, DeviceTensor):
            _to_host(target, source, non_blocking)
        elif isinstance(target, DeviceTensor):
            _to_device(target, source, non_blocking)
        else:
            target.copy_(source)


def _later(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
    def copy() -> None:
        target.copy_(source)

    return copy


def _to_host(target: torch.Tensor, source: DeviceTensor, non_blocking: bool) -> None:
    node = DeviceTensor.node
    node.call("copy to host")
    stream, device = node.current_stream(source.index), node.devices[source.index]
    is_async = non_blocking and node.runtime.is_locked(target)
    copy = _later(target, source.backing)
    stream.enqueue(device.to_host.ask(source.nbytes, copy))
    if not is_async:
        _block(node, stream)


def _to_device(target: DeviceTensor, source: torch.Tensor, non_blocking: bool) -> None:
    node = DeviceTensor.node
    node.call("copy to device")
    stream = node.current_stream(target.index)
    if node.runtime.is_locked(source):
        stream.enqueue(_later(target.backing, source))
        if not non_blocking:
            _block(node, stream)
    else:
        # Pageable memory is copied to a staging buffer before the call returns.
        _block(node, stream)
        stream.enqueue(_later(target.backing, source.clone()))


def _block(node: Node, stream: Stream) -> None:
    if stream.capture is not None:
        raise accelerator_error("operation not permitted when stream is capturing")
    mark: threading.Event = stream.mark()
    stream.device.block(mark)
