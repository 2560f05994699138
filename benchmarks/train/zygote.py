"""Program that imports Megatron once, then forks a rank for each request; see `starts.py`.

Requests and answers are lines of JSON. A list `[command, env, cwd, output]` forks a rank and is
answered with its process id. A process id waits for that rank and is answered with its status.
"""

# ruff: noqa: F401
from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys


def main() -> None:
    import megatron.training.checkpointing
    import megatron.training.training

    import scripts.pretrain_gpt_tiny
    from tests.support.forked.job import run_script

    # Otherwise each rank would look for garbage among the objects of all imports.
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as sock, sock.makefile("rw", buffering=1) as lines:
        for line in lines:
            request = json.loads(line)
            if isinstance(request, int):
                _, status = os.waitpid(request, 0)
                print(os.waitstatus_to_exitcode(status), file=lines)
                continue
            pid = os.fork()
            if not pid:
                sock.close()
                lines.close()
                run_script(*request)
            print(pid, file=lines)


if __name__ == "__main__":
    main()
