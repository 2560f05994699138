"""What a process has from `malloc`: of this one, or of an agent that was started with a meter."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import threading
from typing import Any


def allocated() -> int:
    """Return the bytes that this process has from `malloc` (glibc's `mallinfo2`, all arenas).

    Pages that are resident also grow with fragmentation; these bytes do not. Python's own objects
    are among them with `PYTHONMALLOC=malloc`.
    """
    found = _mallinfo2()()
    return int(found.uordblks + found.hblkhd)


@functools.cache  # what ctypes makes for a function would be counted, too
def _mallinfo2() -> Any:
    fields = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    layout = {"_fields_": [(name, ctypes.c_size_t) for name in fields]}
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = type("mallinfo2", (ctypes.Structure,), layout)
    return ask


def start() -> None:
    """Answer whoever reads the pipe `AGENT_METER`; called in an agent, see `sitecustomize.py`."""
    threading.Thread(target=_answer, args=(os.environ["AGENT_METER"],), daemon=True).start()


def of_agent() -> int:
    """Return what the agent has; `AGENT_METER` is a pipe that was there before it started."""
    said = b""
    while not said:  # it had seen the reader before, and closes
        with open(os.environ["AGENT_METER"], "rb", buffering=0) as pipe:
            said = pipe.read(64)
    return int(said.split()[0])


def _answer(pipe: str) -> None:
    while True:
        out = os.open(pipe, os.O_WRONLY)  # returns when somebody reads
        gc.collect()  # what is garbage must not look like growth
        with contextlib.suppress(BrokenPipeError):
            os.write(out, b"%d\n" % allocated())
        os.close(out)
