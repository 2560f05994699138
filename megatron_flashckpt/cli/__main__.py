"""Runs the `flashckpt` command as `python -m megatron_flashckpt.cli`."""

import sys

from megatron_flashckpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
