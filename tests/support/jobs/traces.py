"""The trace of a rank: events that the test of its job reads."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def trace(**event: Any) -> None:
    """Append an event to `TRACE_DIR/rank_<r>.jsonl`."""
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    with open(Path(os.environ["TRACE_DIR"]) / f"rank_{os.environ['RANK']}.jsonl", "a") as file:
        print(json.dumps({"attempt": attempt, **event}), file=file)
