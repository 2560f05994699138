"""The GPU that a load fills: its stream for the load's threads, and page-locked host memory."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable

import torch

from megatron_flashckpt.memory import cuda

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One rank's GPU, with the stream on which the training thread uses it.

    Every thread of a load copies on that stream. So no copy runs before what the training thread
    asked for earlier (an optimizer that makes its states), or after what it asks for later.
    """

    stream: torch.cuda.Stream

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor]) -> Gpu | None:
        """Return the GPU on which `tensors` lie, None if all lie in host memory.

        Called by the training thread: its current stream is the one to use.
        """
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        return None if device is None else cls(torch.cuda.current_stream(device))

    def enter_thread(self) -> None:
        """Make the device and the stream current in the calling thread.

        The current device of a new thread is 0, on every rank. A thread that did not change it
        would make a context on GPU 0, which takes half a GiB of that GPU's memory per rank.
        """
        cuda.enter_thread(self.stream.device_index)
        torch.cuda.set_stream(self.stream)

    def synchronize(self) -> None:
        """Return when the GPU has made all copies that the calling thread has asked for."""
        torch.cuda.current_stream(self.stream.device).synchronize()

    def host_memory(self, nbytes: int) -> memoryview:
        """Return uninitialized host memory, page-locked if CUDA allows it."""
        memory: memoryview = host_buffer(nbytes, pinned=True).numpy().data
        return memory


def host_buffer(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Return uninitialized host memory, flat uint8; page-locked if `pinned` and CUDA allows it.

    A GPU copies page-locked memory three to five times as fast as other memory, and without making
    the thread wait. PyTorch keeps such memory for later use once the tensor is gone.
    """
    if pinned:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            # PyTorch has taken the error out of CUDA's state of this thread when it raises, so no
            # later kernel of the training thread fails because of it.
            _warn_once(nbytes, str(error))
    return torch.empty(nbytes, dtype=torch.uint8)


#: Reasons that this process has logged. A load makes a buffer per thread and per round of sends,
#: and CUDA refuses them all for one reason.
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
    """Return when the GPU has finished all work of this process; at once if there is no GPU."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
