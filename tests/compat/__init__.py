"""Runs Megatron-LM trees of all releases, and Megatron's own tests; start at `matrix.py`."""
