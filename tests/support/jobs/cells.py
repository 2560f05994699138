"""A job that runs several cells one after the other: which they are, and where ranks meet."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist


def begin() -> tuple[dist.TCPStore, list[tuple[dict[str, Any], dist.Store]]]:
    """Return the job's store, which rank 0 keeps, and the cells (`CASES`) with a store for each."""
    base = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=os.environ["RANK"] == "0",
        wait_for_workers=False,
    )
    gc.freeze()  # what is imported stays: collecting after every cell is cheap then
    cells = json.loads(Path(os.environ["CASES"]).read_text())
    return base, [
        (cell, dist.PrefixStore(f"cell-{number}", base)) for number, cell in enumerate(cells)
    ]
