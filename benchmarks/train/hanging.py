"""Program in place of a training script: it hangs with a process that is hard to find.

The process has another session and an empty environment, is no rank's child, and ignores SIGTERM.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

_SLEEP = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not os.fork():
        command = [sys.executable, "-c", _SLEEP]
        hidden = subprocess.Popen(command, env={}, start_new_session=True)
        print(f"waiting for process {hidden.pid}", flush=True)
        os._exit(0)
    os.wait()
    time.sleep(3600)


if __name__ == "__main__":
    main()
