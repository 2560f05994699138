"""Conversion of checkpoints from and to other formats, in one process on the CPU."""
