"""The crash matrix: real Megatron jobs are killed at every step of a save and a load.

Two ranks and their agent, on real code paths. Each cell names a process, a point where it is
stopped, the how-manieth time it comes there, and what is then killed with SIGKILL: the trainers
(the agent goes on alone), the agent (the trainers go on and find another), or the node. Then the
job is started again, and must go on from the newest iteration that all ranks had staged completely
(or, if the node was lost, committed), from memory whenever it is there, bit for bit; no half
checkpoint may look like a whole one, the next saves must work, and nothing may stay behind.

Other cells ("copy: agent:...", "xor: agent:...") are of two or three nodes that hold copies or
parity for each other, with real agents and trainers without Megatron: an agent is stopped while it
sends, holds or gets back a checkpoint, and nodes are lost.

The others ("two jobs: ...", "second start: ...", "requeue: ...", "forks: ...", "lost socket: ...",
"errors that pass: ...", "names that come late: ...") are described where they are defined, in
`tests/crash`. The last two take a C compiler.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path


def main() -> int:
    # Not at the top: ranks are forked, and look into this file before they know who they are.
    from tests.crash.matrix import PLAIN, STORAGES, run

    parser = argparse.ArgumentParser(prog="scripts/crash", description=__doc__)
    parser.add_argument(
        "--seeds", type=int, default=60, help="cells of two or three random crashes"
    )
    parser.add_argument("--only", default="", help="only cells whose description contains this")
    parser.add_argument("--jobs", type=int, default=1, help="cells at the same time")
    parser.add_argument("--keep", type=Path, help="keep what failed cells left, in this directory")
    parser.add_argument(
        "--storage",
        choices=STORAGES,
        default=PLAIN,
        help="what all processes save to; on `faulty` storage they meet errors that pass, late "
        "names and no fallocate (see tests/crash/trouble.py; takes a C compiler)",
    )
    parser.add_argument("--fault-seed", type=int, default=0, help="of faulty storage")
    parser.add_argument("--list", action="store_true", help="only list the cells")
    arguments = parser.parse_args()
    # Like Ctrl-C: the cells that are running come to their end, and leave no process behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return run(**vars(arguments))


if __name__ == "__main__":
    sys.exit(main())
