"""Flash checkpointing for Megatron-LM: save without collectives, restart from memory.

Importing this package imports neither torch nor megatron, so that the agent process stays small.
Entry points for training code are `megatron_flashckpt.checkpointing` and
`megatron_flashckpt.async_utils` (swapped imports), or `megatron_flashckpt.launch` (no edit).
`Checkpointer` saves and loads in a training loop of its own; its first use imports torch.
`report_metric` adds a metric to the next checkpoint; `waiting` overrides the setting `wait` for the
saves in a block.
"""

import importlib
from typing import TYPE_CHECKING, Any

from megatron_flashckpt.metrics import report_metric
from megatron_flashckpt.waits import waiting

if TYPE_CHECKING:
    from megatron_flashckpt.checkpointer import Checkpointer

__all__ = ["FORMAT_VERSION", "Checkpointer", "__version__", "report_metric", "waiting"]

__version__ = "0.1.0"

#: Version of the on-disk format (manifest and shard headers). Readers refuse all others.
FORMAT_VERSION = 2


def __getattr__(name: str) -> Any:
    if name != "Checkpointer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.checkpointer").Checkpointer
