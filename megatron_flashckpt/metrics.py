"""What training code says of the model that is saved next: its validation loss and the like.

Torch-free: importing the package does not load torch, and this is part of it.
"""

from __future__ import annotations

import logging
import math
from typing import SupportsFloat

logger = logging.getLogger(__name__)


class Metrics:
    """Values reported since the last durable save, by name."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def report(self, name: str, value: SupportsFloat) -> None:
        number = float(value)
        if math.isfinite(number):
            self._values[name] = number
        else:
            # Nothing can be ranked by it, and a diverging model is no reason to stop training here.
            self._values.pop(name, None)
            logger.warning("metric '%s' is %s: not recorded", name, number)

    def current(self) -> dict[str, float]:
        return dict(self._values)

    def clear(self) -> None:
        """Forget all: what comes next is another model."""
        self._values.clear()


#: The one of this process, like the function that people call.
reported = Metrics()


def report_metric(name: str, value: SupportsFloat) -> None:
    """Let the next checkpoint say `name: value` of itself, for `retention.best` and for people.

    Called on any rank (of several that report one name, the lowest counts), at the same iteration
    as the save, before it: where Megatron evaluates. A value is said of one checkpoint only.

    Args:
        value: a number, or a tensor that holds one; what is not finite is not recorded.
    """
    reported.report(name, value)
