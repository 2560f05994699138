"""Runs of Megatron-LM trees of all releases, and of Megatron's own tests; start at `matrix.py`."""
