"""Installation of a simulated node behind `torch.cuda`, for the duration of a test."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.cuda._utils import _get_device_index

from tests.simulated_gpu.node import Event, Node, Stream
from tests.simulated_gpu.runtime import Runtime
from tests.simulated_gpu.tensor import DeviceTensor

_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange")


@contextlib.contextmanager
def simulated_gpus(devices: int = 8, *, kind: type[Node] = Node, **settings: Any) -> Iterator[Node]:
    """Make `torch.cuda` and the device "cuda" refer to a simulated node inside the context."""
    node = kind(devices, **settings)
    node.runtime = Runtime(node)
    DeviceTensor.node = node
    with contextlib.ExitStack() as stack:
        for name, value in torch_cuda(node).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for name in _FACTORIES:
            factory = _factory(node, getattr(torch, name))
            stack.enter_context(mock.patch.object(torch, name, factory))
        stack.enter_context(mock.patch.object(torch.Tensor, "cuda", functools.partialmethod(_cuda)))
        stack.enter_context(mock.patch.object(torch.Tensor, "to", _to(torch.Tensor.to)))
        # Patch by name: the package reads its settings when it is imported, and a rank imports this
        # module first.
        library = "megatron_flashckpt.memory.cuda.runtime_library"
        stack.enter_context(mock.patch(library, return_value=node.runtime))
        stack.callback(_end_process)
        stack.callback(node.close)
        yield node


def _end_process() -> None:
    """Release memory that a process keeps locked, as the kernel does at the end of the process."""
    if (pinning := sys.modules.get("megatron_flashckpt.memory.pinned_slab")) is not None:
        pinning._still_locked.clear()


class _MadeByNode(type):
    kind: type
    make: Callable[..., Any]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.make(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.kind)


def _class_of(kind: type, make: Callable[..., Any]) -> type:
    return _MadeByNode(kind.__name__, (), {"kind": kind, "make": staticmethod(make)})


def torch_cuda(node: Node) -> dict[str, Any]:
    def index_of(device: Any) -> int:
        return _get_device_index(device, optional=True)

    def make_stream(device: Any = None, priority: int = 0) -> Stream:
        gpu = node.devices[index_of(device)]
        node.call("Stream", device=gpu)
        return gpu.pooled_stream(priority)

    def memory_info(device: Any = None) -> tuple[int, int]:
        allocator = node.devices[index_of(device)].allocator
        return allocator.unreserved, allocator.nbytes

    return {  # torch's own `device` and `stream` contexts call these, too
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: len(node.devices),
        "current_device": lambda: node.here.device,
        "set_device": lambda device: node.set_device(_get_device_index(device)),
        "_exchange_device": node.exchange_device,
        "_maybe_exchange_device": node.exchange_device,
        "Stream": _class_of(Stream, make_stream),
        "Event": _class_of(Event, functools.partial(Event, node)),
        "current_stream": lambda device=None: node.current_stream(index_of(device)),
        "default_stream": lambda device=None: node.devices[index_of(device)].default_stream,
        "set_stream": node.set_stream,
        "synchronize": lambda device=None: node.synchronize(index_of(device)),
        "cudart": lambda: node.runtime,
        "is_current_stream_capturing": lambda: node.current_stream().capture is not None,
        "mem_get_info": memory_info,
        "empty_cache": node.empty_cache,
        "get_device_properties": lambda device: SimpleNamespace(
            pci_domain_id=0, pci_bus_id=index_of(device), pci_device_id=0
        ),
    }


def _factory(node: Node, real: Any) -> Any:
    @functools.wraps(real)
    def make(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Any:
        if device is not None and torch.device(device).type == "cuda":
            index = _get_device_index(torch.device(device), optional=True)
            values = real(*args, **kwargs)
            if real.__name__ == "empty":
                return DeviceTensor.allocate(values.shape, values.dtype, index)
            if real.__name__ == "tensor":  # torch makes it on the host and copies
                return DeviceTensor.allocate(values.shape, values.dtype, index).copy_(values)
            return DeviceTensor.put(values, index)
        made = real(*args, device=device, **kwargs)
        if pin_memory and made.nbytes:
            node.runtime.lock_new(made)
        return made

    return make


def _cuda(tensor: torch.Tensor, device: Any = None, non_blocking: bool = False) -> torch.Tensor:
    index = _get_device_index(device, optional=True)
    if isinstance(tensor, DeviceTensor) and tensor.index == index:
        return tensor
    return DeviceTensor.allocate(tensor.shape, tensor.dtype, index).copy_(tensor, non_blocking)


def _to(real: Any) -> Any:
    @functools.wraps(real)
    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        wanted = kwargs.get("device", args[0] if args else None)
        if isinstance(wanted, (str, torch.device)) and torch.device(wanted).type == "cuda":
            if len(args) + len(kwargs) > 1:
                raise NotImplementedError(f"to{args}: not simulated")
            return _cuda(tensor, torch.device(wanted))
        return real(tensor, *args, **kwargs)

    return to
