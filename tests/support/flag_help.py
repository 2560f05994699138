"""The help of Megatron's flags, which a process of tests reads only once."""

from __future__ import annotations

import argparse
from typing import Any

from megatron.training import arguments
from megatron.training.argument_utils import ArgumentGroupFactory


def keep() -> None:
    """Read the help now, and keep it for all later command lines of this process and its forks.

    Megatron parses its own sources for each command line, twice in a job, which takes more CPU time
    than a tiny job itself.
    """
    read = ArgumentGroupFactory._get_field_docstrings
    known: dict[type, dict[str, str]] = {}

    def help_of_fields(self: Any, config: type) -> dict[str, str]:
        if config not in known:
            known[config] = read(self, config)
        return dict(known[config])

    ArgumentGroupFactory._get_field_docstrings = help_of_fields
    arguments.add_megatron_arguments(argparse.ArgumentParser())
