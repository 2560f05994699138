"""Run a script with its arguments in a process that cannot import `megatron.training`."""

from __future__ import annotations

import runpy
import sys
from importlib.abc import MetaPathFinder
from typing import Any

BLOCKED = "megatron.training"


class Blocker(MetaPathFinder):
    """Refuses the import of Megatron's own training loop."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == BLOCKED or name.startswith(f"{BLOCKED}."):
            raise ModuleNotFoundError(f"{name} is blocked by this test", name=name)


if __name__ == "__main__":
    assert BLOCKED not in sys.modules
    sys.meta_path.insert(0, Blocker())
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
