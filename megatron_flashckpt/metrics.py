"""Metrics that training code reports of the model that is saved next, e.g. a validation loss.

This module does not import torch, because `import megatron_flashckpt` imports it.
"""

from __future__ import annotations

import logging
import math
from typing import SupportsFloat

logger = logging.getLogger(__name__)

#: Finite values reported since the last durable save, by name.
reported: dict[str, float] = {}


def report_metric(name: str, value: SupportsFloat) -> None:
    """Record `name: value` in the next checkpoint, for `retention.best` and for `inspect`.

    Any rank may call it, at the iteration of the save and before the save: where Megatron
    evaluates. If several ranks report one name, the lowest rank's value counts. A value is recorded
    in one checkpoint only.

    Args:
        value: a number, or a tensor with one number; a value that is not finite is not recorded.
    """
    number = float(value)
    if math.isfinite(number):
        reported[name] = number
    else:
        # NaN and infinity cannot be ranked. A diverging model must not stop training here.
        reported.pop(name, None)
        logger.warning("metric '%s' is %s, so it was not recorded", name, number)
