"""The `flashckpt` command line; `commands` holds its commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status (wrong usage raises SystemExit(2))."""
    try:
        # Imports take half of a short command's time, so Ctrl-C may arrive during them.
        from megatron_flashckpt.cli import commands

        return commands.main(argv)
    except KeyboardInterrupt:
        print("flashckpt: interrupted", file=sys.stderr)
        return 130
