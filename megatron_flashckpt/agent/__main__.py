"""`python -m megatron_flashckpt.agent`: started by a node's first rank or by `flashckpt agent`."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys

import msgspec

from megatron_flashckpt import failpoints
from megatron_flashckpt.agent import log
from megatron_flashckpt.agent.node import options_of
from megatron_flashckpt.agent.place import AgentSocket, Place, PlaceTakenError
from megatron_flashckpt.agent.process import AgentProcess
from megatron_flashckpt.agent.reception import raise_limit
from megatron_flashckpt.agent.server import Agent
from megatron_flashckpt.agent.settings import AgentSettings

_SETTINGS = msgspec.json.Decoder(AgentSettings)


def main() -> int:
    parser = argparse.ArgumentParser(prog="megatron_flashckpt.agent")
    parser.add_argument("--key", required=True)
    parser.add_argument("--runtime-dir")
    parser.add_argument("--root", required=True)
    parser.add_argument("--settings", required=True)
    parser.add_argument("--foreground", action="store_true")
    arguments = parser.parse_args()
    settings = _SETTINGS.decode(arguments.settings)
    place = Place(arguments.key, arguments.runtime_dir)
    options = options_of(settings, arguments.root, foreground=arguments.foreground)
    if arguments.foreground:
        # Imported here, because other agents start faster without this module.
        from megatron_flashckpt.agent import foreground

        return foreground.serve(place, options)

    try:
        own = AgentSocket(place)
    except PlaceTakenError:
        return 0  # another agent serves this directory
    # Only now: an agent that has left since may have removed the log that is our stderr.
    log_fd = place.open_log()
    for stream in (1, 2):
        os.dup2(log_fd, stream)
    os.close(log_fd)

    errors = log.begin(logging.StreamHandler(sys.stderr))
    # The agent must survive Ctrl-C in the training terminal and a SIGHUP of its shell. It must also
    # survive the signals by which schedulers announce the end of a job (Slurm's --signal).
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)
    failpoints.set_process_name("agent")
    raise_limit()
    process = AgentProcess(options)
    # The parent exits as soon as trainers can connect: its starter reaps it, and the agent has no
    # parent. Forking is safe, because no thread has been started yet.
    ready, listening = os.pipe()
    if os.fork():
        os.close(listening)
        os._exit(0 if os.read(ready, 1) else 1)
    os.close(ready)
    # After the fork, because the kernel reports the process that called `listen` to trainers
    # (`frames.peer`), and they kill that process if it hangs.
    own.listen()
    agent = Agent(own, options, process)
    os.write(listening, b"1")
    os.close(listening)
    logging.info("agent %d serves %s", os.getpid(), arguments.root)
    logging.info("this process has %s", process)
    signal.signal(signal.SIGTERM, lambda *_: agent.end_soon())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    agent.serve()
    own.leave(keep_log=errors.seen)
    logging.shutdown()
    log.last_lines()
    # `os._exit` ends the threads, for which the interpreter would wait: one may be writing to a
    # storage that hangs.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
