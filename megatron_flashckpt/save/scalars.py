"""Named scalars of a save for TensorBoard and similar writers. Torch-free."""

from __future__ import annotations

from megatron_flashckpt.agent.protocol import Outcome
from megatron_flashckpt.tracing import Recorder


def save_scalars(outcome: Outcome, own: Recorder | None, failures: int) -> dict[str, float]:
    """Return the scalars of a save that has an outcome.

    The outcome of a committed save holds the timings of all ranks, of which the slowest counts.

    Args:
        own: this rank's recorder of the save, if known.
        failures: number of consecutive failed saves, including this one.
    """
    blocked_s = 0.0 if own is None else own.blocked_s
    if outcome.kept:
        return {"checkpoint/memory/blocked_ms": 1000 * blocked_s}
    scalars: dict[str, float] = {"checkpoint/failures_in_a_row": failures}
    if (cost := outcome.cost) is not None:
        blocked_s = max(blocked_s, cost.blocked_s)
        scalars["checkpoint/staged_s"] = cost.staged_s
        scalars["checkpoint/durable_s"] = cost.durable_s
        scalars["checkpoint/bytes"] = cost.nbytes
        scalars["checkpoint/gb_per_s"] = cost.nbytes / 1e9 / max(cost.durable_s, 1e-9)
    scalars["checkpoint/blocked_ms"] = 1000 * blocked_s
    return scalars
