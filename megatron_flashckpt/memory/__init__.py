"""Host memory: slabs, slots, and the copies into them.

`slot` and `slab` do not import torch, because the agent uses them too; `stager` and `step_hook`
belong to the trainer.
"""
