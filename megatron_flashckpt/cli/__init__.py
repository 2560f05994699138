"""The `flashckpt` command; start reading at `commands`."""

from megatron_flashckpt.cli.commands import main

__all__ = ["main"]
