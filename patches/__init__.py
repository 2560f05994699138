"""Patches that swap Megatron's checkpointing imports; start reading at `patch.py`."""
