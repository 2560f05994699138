"""Entry point of `python -m megatron_flashckpt.cli`, the `flashckpt` command."""

import sys

from megatron_flashckpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
