"""Redundancy between agents: staged checkpoints survive the loss of a node, without storage.

`redundancy.py` is imported only where `redundancy` is configured: it needs pyzmq, which is an extra
and takes 20 ms to load.
"""
