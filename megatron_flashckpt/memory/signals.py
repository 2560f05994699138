"""Numbers in a slab's first page, which the agent and its trainer read in every round and step.

A request to the agent takes 344 us, and 9 to 18 ms while the agent waits for a core. So the trainer
compares the agent's counters with their former values, and asks only if one of them requires a
request.
"""

from __future__ import annotations

import ctypes

#: Offset in the slab: behind `SlabGeometry`, in a cache line of their own.
OFFSET = 64


class Signals(ctypes.Structure):
    """The numbers of one slab. The agent holds its lock around its changes.

    ctypes reads and writes each aligned number with one machine instruction, so the other process
    never sees half of a change. `struct` does not.
    """

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("news", "beats", "save_at", "trained"))
    news: int
    """Number of changes of what the agent would report to the trainer."""
    beats: int
    """Number of rounds of the agent's main loop; constant while the agent is stopped."""
    save_at: int
    """Iteration after which a save is requested; 0: none. Set by the agent."""
    trained: int
    """The last iteration that the trainer has completed; 0: unknown. Set by the trainer."""
