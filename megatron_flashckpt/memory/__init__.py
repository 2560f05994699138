"""Host memory: slabs, slots, page-locking, and the limits of a node.

`slot` and `slab` do not import torch, because the agent uses them too. `cuda`, `pinned_slab` and
`runs` serve the training process.
"""
