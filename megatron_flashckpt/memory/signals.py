"""Numbers in a slab's first page, which the agent and its trainer read in every round and step.

A request to the agent takes 344 us, and 9 to 18 ms while the agent waits for a core. So the trainer
compares the agent's counters with their former values, and asks only if one of them requires a
request.
"""

from __future__ import annotations

#: Offset in the slab: behind `SlabGeometry`, in a cache line of their own.
_OFFSET = 64
_NEWS, _BEATS, _SAVE_AT, _TRAINED = range(4)
_NBYTES = 32


class Signals:
    """A view of the numbers of one slab. The agent holds its lock around its changes."""

    def __init__(self, memory: memoryview) -> None:
        # A memoryview of this format reads and writes each aligned counter with one machine
        # instruction, so the other process never sees half of a change. `struct` does not.
        self._counters = memory[_OFFSET : _OFFSET + _NBYTES].cast("Q")

    @property
    def news(self) -> int:
        """Number of changes of what the agent would report to the trainer."""
        return self._counters[_NEWS]

    @property
    def beats(self) -> int:
        """Number of rounds of the agent's main loop; constant while the agent is stopped."""
        return self._counters[_BEATS]

    @property
    def save_at(self) -> int:
        """Iteration after which a save is requested; 0: none. Set by the agent."""
        return self._counters[_SAVE_AT]

    @save_at.setter
    def save_at(self, iteration: int) -> None:
        self._counters[_SAVE_AT] = iteration

    @property
    def trained(self) -> int:
        """The last iteration that the trainer has completed; 0: unknown. Set by the trainer."""
        return self._counters[_TRAINED]

    @trained.setter
    def trained(self, iteration: int) -> None:
        self._counters[_TRAINED] = iteration

    def add_news(self) -> None:
        self._counters[_NEWS] += 1

    def add_beat(self) -> None:
        self._counters[_BEATS] += 1

    def close(self) -> None:
        """Release the view, so that the slab can be unmapped."""
        self._counters.release()
