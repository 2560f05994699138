"""Agent that digests no slot while a file exists: `python -m tools.gpu_check.undigested_agent`."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

from megatron_flashckpt.agent import __main__ as agent
from megatron_flashckpt.agent.rank_slots import SlotInfo


def switch() -> Path:
    """Return the path of the file, next to the runtime directory of agent and trainer."""
    return Path(os.environ["FLASHCKPT_RUNTIME_DIR"] + ".undigested")


def main() -> int:
    """Run the agent with the arguments after its usual module, by which tests find agents."""
    del sys.argv[1]
    has_settled = SlotInfo.has_settled

    def has_settled_and_counts(info: SlotInfo, before: float) -> bool:
        if has_settled(info, before) and switch().exists():
            info.accepted_at = math.inf  # not later either, which would fall into other blocks
        return has_settled(info, before)

    SlotInfo.has_settled = has_settled_and_counts  # type: ignore[method-assign]
    return agent.main()


if __name__ == "__main__":
    sys.exit(main())
