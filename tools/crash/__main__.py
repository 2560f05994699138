"""The crash matrix: real Megatron jobs are killed at every step of a save and a load.

A job has two ranks and their agent, and runs the real code. Each cell names a process and the hit
of a failpoint at which that process is stopped. Then SIGKILL ends the trainers (the agent
continues), the agent (the trainers continue with a new one), or the node, which means all of them.

The job is started again. It must resume bit for bit from the newest iteration that all ranks had
staged completely, from memory if possible. After the loss of a node, it must resume from the newest
committed iteration.
No partial checkpoint may look complete, the next saves must work, and no files may be left over.

Other cells ("copy: agent:...", "xor: agent:...") have two or three nodes that hold copies or parity
for each other, with real agents, and trainers without Megatron. An agent is stopped while it sends,
holds or gets back a checkpoint, and nodes are lost.

The modules of `tools/crash` describe the remaining cells ("two jobs: ...", "second start: ...",
"requeue: ...", "forks: ...", "errors that pass: ...", "names that come late: ...").
The last two need a C compiler.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path


def main() -> int:
    # Imported here: forked ranks import this file before their environment is set.
    from tools.crash.matrix import run
    from tools.crash.roots import PLAIN, STORAGES

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
        help="storage of all processes; `faulty` has errors that pass, late names and no fallocate "
        "(see tools/crash/trouble.py), and needs a C compiler; `s3` is a bucket of SeaweedFS, for "
        "cells of one job, of two, and of requeues",
    )
    parser.add_argument("--fault-seed", type=int, default=0, help="seed of the faults of storage")
    parser.add_argument("--list", action="store_true", help="only list the cells")
    arguments = parser.parse_args()
    # SIGTERM acts like Ctrl-C: the running cells finish and leave no process behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return run(**vars(arguments))


if __name__ == "__main__":
    sys.exit(main())
