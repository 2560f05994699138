"""Host memory that a GPU copies at full speed."""

from __future__ import annotations

import logging

import torch

logger = logging.getLogger(__name__)


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
            logger.warning(
                "a buffer of %d bytes could not be page-locked (%s), so this load copies to the "
                "GPU more slowly; look for a limit on locked memory of this process or container",
                nbytes,
                error,
            )
    return torch.empty(nbytes, dtype=torch.uint8)
