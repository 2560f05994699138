"""A meter of `malloc` memory, of this process or of an agent that was started with the meter."""

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

    Resident pages also grow with fragmentation; these bytes do not. They include Python's own
    objects if `PYTHONMALLOC=malloc`.
    """
    info = _mallinfo2()()
    return int(info.uordblks + info.hblkhd)


@functools.cache  # objects that ctypes makes for a function would count as growth
def _mallinfo2() -> Any:
    fields = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    layout = {"_fields_": [(name, ctypes.c_size_t) for name in fields]}
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = type("mallinfo2", (ctypes.Structure,), layout)
    return ask


def start() -> None:
    """Answer every reader of the pipe `AGENT_METER`; `sitecustomize.py` calls this in an agent."""
    threading.Thread(target=_answer, args=(os.environ["AGENT_METER"],), daemon=True).start()


def of_agent() -> int:
    """Return the agent's bytes; the pipe `AGENT_METER` must have existed before the agent."""
    answer = b""
    while not answer:  # empty if the agent was still closing the pipe for the previous reader
        with open(os.environ["AGENT_METER"], "rb", buffering=0) as pipe:
            answer = pipe.read(64)
    return int(answer.split()[0])


def _answer(pipe: str) -> None:
    while True:
        out = os.open(pipe, os.O_WRONLY)  # returns when a reader opens the pipe
        gc.collect()  # garbage must not look like growth
        with contextlib.suppress(BrokenPipeError):
            os.write(out, b"%d\n" % allocated())
        os.close(out)
