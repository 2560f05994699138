"""The `flashckpt` command line; `commands` is its entry point."""

from megatron_flashckpt.cli.commands import main

__all__ = ["main"]
