"""Processes of Megatron ranks that are forked from one that has imported everything.

Importing torch and Megatron takes seconds per rank, which is most of what a tiny job costs.
"""
