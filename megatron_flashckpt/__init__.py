"""Flash checkpointing for Megatron-LM: save without collectives, restart from memory.

Importing this package imports neither torch nor megatron, so that the agent process stays small.
Entry points for training code are `megatron_flashckpt.checkpointing` and
`megatron_flashckpt.async_utils` (swapped imports), or `megatron_flashckpt.launch` (no edit).
`report_metric` adds a metric to the next checkpoint; `waiting` overrides the setting `wait` for the
saves in a block.
"""

from megatron_flashckpt.metrics import report_metric
from megatron_flashckpt.waits import waiting

__all__ = ["FORMAT_VERSION", "__version__", "report_metric", "waiting"]

__version__ = "0.1.0"

#: Version of the on-disk format (manifest and shard headers). Readers refuse all others.
FORMAT_VERSION = 2
