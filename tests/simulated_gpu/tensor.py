"""Tensors of a simulated device, whose operations are enqueued on the current stream.

Rules (`aten/src/ATen/native/cuda/Copy.cu`, CUDA Runtime API "API synchronization behavior"): an
operation runs on the calling thread's current stream of the *tensor's* device, whatever device
is current. A copy between host and device is asynchronous only with `non_blocking`, and
if the host memory is page-locked and contiguous. It reads its source when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_flatten, tree_map

from tests.simulated_gpu.allocator import Block
from tests.simulated_gpu.node import Node, Stream, accelerator_error

aten = torch.ops.aten

#: Operations that do not write to their memory.
_UNINITIALIZED = {aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default}


class DeviceTensor(torch.Tensor):
    """Tensor on a simulated device; its values are in `backing`, which only streams access."""

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

    def get_device(self) -> int:
        return self.index

    @classmethod
    def allocate(cls, shape: Any, dtype: torch.dtype, index: int) -> DeviceTensor:
        """Return an uninitialized tensor, with the former contents of its memory."""
        like = torch.empty(shape, dtype=dtype, device="meta")
        gpu, stream = cls.node.devices[index], cls.node.current_stream(index)
        if like.numel():  # torch asks the driver for memory in other modes during a capture
            cls.node.call("allocate", device=gpu, unsafe=not cls.node.is_capturing_here)
        block, memory = gpu.allocator.allocate(like.numel() * like.itemsize, stream)
        if stream.capture is not None:
            stream.capture.kept.append(block)
        return cls(memory.view(dtype).view(like.shape), block, index)

    @classmethod
    def put(cls, values: torch.Tensor, index: int) -> DeviceTensor:
        made = cls.allocate(values.shape, values.dtype, index)
        _launch(cls.node, index, "fill", _later(made.backing, values.clone()))
        return made

    def data_ptr(self) -> int:
        return self.backing.data_ptr()

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        self.block.record_stream(stream)

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


def _argument(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return value.backing
    # A number on the host is read when the kernel is launched.
    return value.clone() if isinstance(value, torch.Tensor) else value


def _launch(node: Node, index: int, name: str, work: Callable[[], None]) -> None:
    """Enqueue a kernel; raise the pending error of an earlier call of this thread."""
    node.call(f"kernel {name}", device=node.devices[index])
    if (latched := node.here.latched) is not None:
        node.here.latched = None
        raise accelerator_error(latched)
    node.current_stream(index).enqueue(work)


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
    raw_args, raw_kwargs = tree_map(_argument, (args, kwargs))
    if func._schema.is_mutable:
        _launch(node, index, str(func), lambda: func(*raw_args, **raw_kwargs))
        return None if not func._schema.returns else args[0]

    def on_meta(value: Any) -> Any:
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    shapes = func(*tree_map(on_meta, raw_args), **tree_map(on_meta, raw_kwargs))
    flat, _ = tree_flatten(shapes)
    results = [DeviceTensor.allocate(shape.shape, shape.dtype, index) for shape in flat]
    if func in _UNINITIALIZED:
        return results[0]
    backings = [result.backing for result in results]

    def run() -> None:
        made, _ = tree_flatten(func(*raw_args, **raw_kwargs))
        for backing, value in zip(backings, made, strict=True):
            backing.copy_(value)

    _launch(node, index, str(func), run)
    return results[0] if isinstance(shapes, torch.Tensor) else results


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    flat, _ = tree_flatten(values)
    return (value for value in flat if isinstance(value, torch.Tensor))


def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]], non_blocking: bool) -> None:
    for target, source in pairs:
        if isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor):
            _between_devices(target, source)
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


def _between_devices(target: DeviceTensor, source: DeviceTensor) -> None:
    """Copy on the stream of the source's device; both devices' streams wait for each other."""
    node = DeviceTensor.node
    stream, other = node.current_stream(source.index), node.current_stream(target.index)
    if stream is not other:
        stream.wait_stream(other)
    _launch(node, source.index, "copy", _later(target.backing, source.backing))
    if stream is not other:
        other.wait_stream(stream)


def _to_host(target: torch.Tensor, source: DeviceTensor, non_blocking: bool) -> None:
    node = DeviceTensor.node
    node.call("copy to host", device=node.devices[source.index])
    stream = node.current_stream(source.index)
    is_locked = _is_locked(stream, target)
    stream.enqueue_to_host(source.nbytes, _later(target, source.backing))
    if not (non_blocking and is_locked):
        stream.synchronize()


def _to_device(target: DeviceTensor, source: torch.Tensor, non_blocking: bool) -> None:
    node = DeviceTensor.node
    node.call("copy to device", device=node.devices[target.index])
    stream = node.current_stream(target.index)
    is_locked = _is_locked(stream, source)
    if not is_locked:  # the copy goes to a staging buffer, after all earlier work of the stream
        stream.synchronize()
        source = source.clone()
    stream.enqueue(_later(target.backing, source))
    if not non_blocking:
        stream.synchronize()


def _is_locked(stream: Stream, host: torch.Tensor) -> bool:
    """Return whether the device itself reads or writes the host tensor.

    Memory that is not contiguous is copied through a pageable buffer.
    """
    is_locked = host.is_contiguous() and stream.gpu.node.runtime.is_locked(host)
    if not is_locked and stream.capture is not None:
        raise RuntimeError(
            "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU "
            "tensor is pinned."
        )
    return bool(is_locked)
