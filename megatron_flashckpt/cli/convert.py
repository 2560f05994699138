"""`flashckpt convert`. Starts without torch: the formats are imported when the command runs."""

from __future__ import annotations

import argparse
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

from megatron_flashckpt.cli.console import complain, human_size, progress_bar, say
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.errors import UnsupportedError

FORMATS = ("flashckpt", "torch_dist", "torch", "safetensors")

_SIZE = re.compile(r"(?P<number>\d{1,12})(?P<unit>[KMGT]?)(i?B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_DEFAULTS = Options()


def add_parser(commands: Any, iteration: Callable[[str], int]) -> None:
    """Add the command to `commands`, of argparse."""
    parser = commands.add_parser(
        "convert",
        help="write a checkpoint in another format",
        description="Write a checkpoint of SRC, whose format is found out, into DST in another "
        "format, on the CPU and in this one process. Needs torch and megatron-core.",
    )
    parser.add_argument("source", metavar="SRC", type=_path, help="save directory")
    parser.add_argument("destination", metavar="DST", type=_path, help="save directory; created")
    parser.add_argument(
        "--to",
        required=True,
        choices=FORMATS,
        help="torch_dist and torch are Megatron's own; safetensors: weights only, by name, and "
        "straight into DST",
    )
    chosen = "default: the one that the tracker names"
    parser.add_argument("--iteration", type=iteration, metavar="N", help=chosen)
    parser.add_argument(
        "--weights-only", action="store_true", help="leave out all that only training needs"
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the result of an earlier conversion; nothing else is ever replaced",
    )
    parser.add_argument(
        "--accept-damage",
        action="store_true",
        help="convert optimizer state even if it does not fit the weights",
    )
    parser.add_argument(
        "--max-file-size",
        type=_size,
        default=_DEFAULTS.shard_nbytes,
        metavar="SIZE",
        help=f"start a new file after this many bytes, default "
        f"{human_size(_DEFAULTS.shard_nbytes)} (torch: has one file per rank)",
    )
    parser.add_argument(
        "--memory",
        type=_size,
        default=_DEFAULTS.memory_nbytes,
        metavar="SIZE",
        help="for chunks of SRC that may be needed again, default "
        f"{human_size(_DEFAULTS.memory_nbytes)}; the largest box comes on top",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, out: Console) -> int:
    """Convert; return the exit status."""
    with warnings.catch_warnings():
        # Megatron, as it is imported, tells of every library that would make training faster.
        warnings.filterwarnings("ignore", module=r"megatron\.")
        return _run(args, out, _formats())


def _run(args: argparse.Namespace, out: Console, formats: ModuleType) -> int:
    options = Options(
        overwrite=args.overwrite,
        weights_only=args.weights_only or args.to == "safetensors",
        accept_damage=args.accept_damage,
        shard_nbytes=args.max_file_size,
        memory_nbytes=args.memory,
    )
    opened = formats.open_source(args.source, args.iteration, options)
    contents = opened.contents
    for warning in contents.warnings:
        complain(f"note: {warning}", 0)
    with progress_bar() as progress:
        task = progress.add_task(args.to, total=opened.nbytes)
        result = formats.convert(
            opened,
            args.destination,
            args.to,
            options,
            lambda nbytes: progress.advance(task, nbytes),
        )
    say(
        out,
        f"{contents.place} ({opened.format}, iteration {contents.iteration}): "
        f"{len(contents.tensors)} tensors, {human_size(opened.nbytes)}",
    )
    say(out, f"{result} ({args.to})")
    return 0


def _formats() -> ModuleType:
    try:
        from megatron_flashckpt.convert import formats
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("torch", "megatron"):
            raise
        raise UnsupportedError(
            f"there is no {error.name} in this environment; convert where Megatron-LM is installed "
            "(no GPU is needed)"
        ) from error
    return formats


def _path(text: str) -> Path:
    if not text.strip():  # an unset variable; it would mean the working directory
        raise argparse.ArgumentTypeError(f"{text!r} names no directory")
    return Path(text)


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None or not int(match["number"]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size, as 500M or 4G are")
    return int(match["number"]) * _UNITS[match["unit"].upper()]
