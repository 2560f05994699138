"""The GPU that a load fills: its stream for the threads of the load, and page-locked memory."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable

import torch

from megatron_flashckpt.memory import cuda

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A rank's GPU, with the current stream of the training thread.

    All threads of a load copy on that stream. So every copy runs after work that the training
    thread enqueued earlier (an optimizer that creates its states), and before its later work.
    """

    stream: torch.cuda.Stream

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor]) -> Gpu | None:
        """Return the GPU that holds `tensors`, or None if all are in host memory.

        Called by the training thread, whose current stream the load uses.
        """
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        return None if device is None else cls(torch.cuda.current_stream(device))

    def enter_thread(self) -> None:
        """Make the device and the stream current in the calling thread.

        A new thread starts on device 0, on every rank. Its first CUDA call there would create a
        context on GPU 0, which takes half a GiB of that GPU's memory per rank.
        """
        cuda.enter_thread(self.stream.device_index)
        torch.cuda.set_stream(self.stream)

    def synchronize(self) -> None:
        """Wait until the GPU has made all copies that the calling thread has enqueued."""
        torch.cuda.current_stream(self.stream.device).synchronize()


def host_buffer(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Return uninitialized host memory, flat uint8; page-locked if `pinned` and CUDA allows it.

    A GPU copies page-locked memory three to five times as fast as other memory, and the thread does
    not wait. PyTorch keeps such memory for later use after the tensor is freed.
    """
    if pinned:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            # PyTorch clears this thread's CUDA error before it raises, so later kernels succeed.
            _warn_once(nbytes, str(error))
    return torch.empty(nbytes, dtype=torch.uint8)


#: Reasons that this process has logged. A load allocates many buffers, and CUDA refuses all for the
#: same reason.
_reported: set[str] = set()


def _warn_once(nbytes: int, reason: str) -> None:
    if reason in _reported:
        return
    _reported.add(reason)
    logger.warning(
        "a buffer of %d bytes could not be page-locked (%s), so this load copies to the GPU more "
        "slowly; usually the kernel or the GPU driver limits page-locked memory: update them",
        nbytes,
        reason,
    )


def synchronize() -> None:
    """Wait until the GPU has finished all work of this process; return at once without a GPU."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
