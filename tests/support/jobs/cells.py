"""A job that runs several cells in turn: its list of cells, and a store for each."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist


def begin() -> tuple[dist.TCPStore, list[tuple[dict[str, Any], dist.Store]]]:
    """Return the store that rank 0 serves, and the cells (`CASES`) with a store for each."""
    base = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=os.environ["RANK"] == "0",
        wait_for_workers=False,
    )
    gc.freeze()  # imported objects stay: collecting garbage after every cell becomes cheap
    cells = json.loads(Path(os.environ["CASES"]).read_text())
    return base, [
        (cell, dist.PrefixStore(f"cell-{number}", base)) for number, cell in enumerate(cells)
    ]
