"""Bytes in host memory: slabs, slots, and the copying into them.

`slot` and `slab` are free of torch, because the agent uses them too; `stager` and `step_hook` are
the trainer's.
"""
