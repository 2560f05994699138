"""Costs of stock Megatron that tests of tiny jobs avoid: they take more CPU time than the jobs."""

from __future__ import annotations

import argparse
import functools
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.training import arguments
from megatron.training.argument_utils import ArgumentGroupFactory


def keep_help() -> None:
    """Read the help of flags now, and keep it for all command lines of this process and its forks.

    Megatron parses its own sources for each command line, twice in a job.
    """
    read = ArgumentGroupFactory._get_field_docstrings
    known: dict[type, dict[str, str]] = {}

    def help_of_fields(self: Any, config: type) -> dict[str, str]:
        if config not in known:
            known[config] = read(self, config)
        return dict(known[config])

    ArgumentGroupFactory._get_field_docstrings = help_of_fields
    arguments.add_megatron_arguments(argparse.ArgumentParser())


def fork_queues() -> None:
    """Fork the process that keeps the queue of a save's results.

    Megatron does so for its persistent worker. Without one it spawns the process, which imports
    torch anew in each job.
    """
    queue = filesystem_async.get_write_results_queue
    filesystem_async.get_write_results_queue = functools.partial(queue, mp_mode="fork")
