"""Agents help each other: staged checkpoints survive the loss of a node, without storage.

Imported only where `redundancy` is configured: pyzmq takes 20 ms to load.
"""
