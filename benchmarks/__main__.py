"""Run benchmarks of saves, loads and their parts, one study at a time."""

from __future__ import annotations

import argparse
import signal
import sys

from rich.console import Console

from benchmarks.studies import STUDIES


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="STUDY")
    for study in STUDIES:
        study.add_to(commands)
    options = parser.parse_args()
    # SIGTERM raises SystemExit, so that the ranks are ended and the files removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    width = None if sys.stdout.isatty() else 140
    options.command(Console(soft_wrap=True, highlight=False, width=width), options)


if __name__ == "__main__":
    main()
