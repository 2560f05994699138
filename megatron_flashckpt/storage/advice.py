"""Advice in messages about a store that does not do what it should, by kind of store."""

from __future__ import annotations

from typing import NamedTuple


class Advice(NamedTuple):
    """Ends of messages about a store that does not do what it should."""

    needs: str
    """Needs of saves, for a store that does it wrongly."""
    away: str
    """Checks for a store that does not answer, or has lost what it held."""
    unseen: str
    """Reason and remedy if a node does not see what other nodes have written."""


FILES = Advice(
    needs="saves need a file system that is shared by all nodes, creates a name for one process "
    "only, and can write at any position of a file, or an object store with conditional puts",
    away="check the file system's servers and this node's mount",
    unseen="each node has a directory of its own there, or files of other nodes become visible "
    "late; save to a file system that all nodes share, mount it with a shorter attribute cache "
    "(NFS: acdirmax), or raise 'probe_wait_s'",
)
OBJECTS = Advice(
    needs="saves need conditional puts (If-None-Match: *), which AWS S3 and SeaweedFS have: bring "
    "the server to a version that has them, or save elsewhere",
    away="check the network and the endpoint, and whether somebody removed objects",
    unseen="the nodes have different endpoints, or objects of other nodes become visible late; "
    "give all nodes the same AWS_*, GOOGLE_* and AZURE_* variables, or raise 'probe_wait_s'",
)
