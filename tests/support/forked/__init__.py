"""Megatron ranks forked from a process that has already imported all packages.

Importing torch and Megatron takes seconds per rank, which dominates the time of a tiny job.
"""
