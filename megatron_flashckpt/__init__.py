"""Flash checkpointing for Megatron-LM: save without collectives, restart from memory.

Importing this package imports neither torch nor megatron: the agent process lives on that.
The doors for training code are `megatron_flashckpt.checkpointing` and
`megatron_flashckpt.async_utils` (swapped imports) and `megatron_flashckpt.launch` (no edit).
`report_metric` tells the next checkpoint how good it is; `waiting` lets one save wait for more, or
less, than the setting `wait` says.
"""

from megatron_flashckpt.metrics import report_metric
from megatron_flashckpt.waits import waiting

__all__ = ["FORMAT_VERSION", "__version__", "report_metric", "waiting"]

__version__ = "0.1.0"

#: Version of the on-disk format (manifest and shard headers). Readers refuse newer ones.
FORMAT_VERSION = 1
