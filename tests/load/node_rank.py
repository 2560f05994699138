"""A program that is one rank and reads once per node: `node_rank.py OPTIONS`.

It expects torchrun's variables and prints the answer. Every call of its `read` first appends the
rank to a file.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from megatron_flashckpt.load import node_leader


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--reads", type=Path, help="every read is noted here")
    parser.add_argument("--content", help="what is read")
    parser.add_argument("--appear-s", type=float, default=node_leader.APPEAR_S)
    parser.add_argument("--answer-s", type=float, default=node_leader.ANSWER_S)
    parser.add_argument("--in-read", choices=["return", "fork-and-hang", "await"], default="return")
    parser.add_argument("--stay", action="store_true", help="live until stdin is closed")
    options = parser.parse_args()
    node_leader.APPEAR_S, node_leader.ANSWER_S = options.appear_s, options.answer_s

    def read() -> bytes:
        with open(options.reads, "a") as file:
            print(os.environ["RANK"], file=file)
        while options.in_read == "await" and not (options.reads.parent / "go").exists():
            time.sleep(0.01)
        if options.in_read == "fork-and-hang" and os.fork() == 0:
            # The child survives its parent, as a data loader's worker may.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            print(os.getpid(), flush=True)
            time.sleep(600)
        if options.in_read == "fork-and-hang":
            time.sleep(600)
        return options.content.encode()

    print(node_leader.read_once("topic", read, bytes, bytes).decode(), flush=True)
    if options.stay:
        sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
