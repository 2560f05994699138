"""`flashckpt convert`: write a checkpoint in another format.

This module does not import torch; `run` imports the formats, which do.
"""

from __future__ import annotations

import argparse
import logging
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

from megatron_flashckpt.cli.console import (
    complain,
    directory_argument,
    human_size,
    human_time,
    progress_bar,
    save_argument,
    say,
)
from megatron_flashckpt.convert.common.options import Options
from megatron_flashckpt.errors import ConfigError, UnsupportedError

FORMATS = ("flashckpt", "torch_dist", "torch", "safetensors", "hf")
#: Formats that hold weights only.
_OF_WEIGHTS = ("safetensors", "hf")
#: Formats that are read: ours, those of `formats.SOURCES`, and directories of models.
SOURCES = ("flashckpt", "torch_dist", "dlrover", "torch", "hf")

_SIZE = re.compile(r"(?P<number>\d{1,12})(?P<unit>[KMGT]?)(i?B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_DEFAULTS = Options()


def add_parser(subparsers: Any, iteration: Callable[[str], int]) -> None:
    """Add `convert` to the argparse subparsers `subparsers`."""
    parser = subparsers.add_parser(
        "convert",
        help="write a checkpoint in another format",
        description="Write one checkpoint of SRC into DST in another format. The format of SRC is "
        "detected. The conversion runs on the CPU in one process, and needs torch and "
        "megatron-core.",
    )
    parser.add_argument(
        "source",
        metavar="SRC",
        type=save_argument,
        help="save directory to read; or its URL, where only flashckpt is read",
    )
    parser.add_argument(
        "destination",
        metavar="DST",
        type=_path,
        help="save directory to write, not a URL; created if missing",
    )
    parser.add_argument(
        "--to",
        required=True,
        choices=FORMATS,
        help="torch_dist and torch are Megatron's own formats; safetensors holds only weights, by "
        "Megatron's names, directly in DST; hf is a Hugging Face model, directly in DST, and needs "
        "--hf-config",
    )
    parser.add_argument(
        "--from",
        dest="source_format",
        choices=SOURCES,
        help="fail if SRC has another format; hf is a directory with a Hugging Face model, whose "
        "weights become iteration 0; default: the format that is found",
    )
    parser.add_argument(
        "--hf-config",
        type=_path,
        metavar="DIR",
        help="directory with config.json and tokenizer of the Hugging Face model; --to hf copies "
        "them, and compares all tensors and arguments with config.json; default if SRC is such a "
        "model: SRC",
    )
    iteration_help = "iteration to convert; default: the one that the tracker names"
    parser.add_argument("--iteration", type=iteration, metavar="N", help=iteration_help)
    parser.add_argument(
        "--weights-only",
        action="store_true",
        help="convert weights and buffers only; leave out optimizer, scheduler and random state",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the result of an earlier conversion; other files are never replaced",
    )
    parser.add_argument(
        "--accept-damage",
        action="store_true",
        help="convert the optimizer state even if it does not match the weights",
    )
    parser.add_argument(
        "--max-file-size",
        type=_size,
        default=_DEFAULTS.shard_nbytes,
        metavar="SIZE",
        help="start a new file after this many bytes (default: "
        f"{human_size(_DEFAULTS.shard_nbytes)}); without effect for torch, which has one file per "
        "rank",
    )
    parser.add_argument(
        "--memory",
        type=_size,
        default=_DEFAULTS.memory_nbytes,
        metavar="SIZE",
        help="memory that caches chunks of SRC (default: "
        f"{human_size(_DEFAULTS.memory_nbytes)}); the largest tensor part needs memory in addition",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, out: Console) -> int:
    """Convert; return the exit status."""
    with warnings.catch_warnings():
        # Megatron's import warns about each missing library that would speed up training.
        warnings.filterwarnings("ignore", module=r"megatron\.")
        # So does torch about a CUDA toolkit on a node without a GPU.
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        return _run(args, out)


def _run(args: argparse.Namespace, out: Console) -> int:
    options = Options(
        overwrite=args.overwrite,
        weights_only=args.weights_only or args.to in _OF_WEIGHTS,
        accept_damage=args.accept_damage,
        shard_nbytes=args.max_file_size,
        memory_nbytes=args.memory,
        hf_config=args.hf_config,
    )
    started = time.monotonic()
    with progress_bar() as progress:
        # The imports and the model's reconstruction take seconds, in which nothing is read.
        task = progress.add_task("importing torch and Megatron", total=None)
        formats = _formats()
        progress.update(task, description="opening the source")
        opened = formats.open_source(args.source, args.iteration, options)
        if args.source_format not in (None, opened.format):
            raise ConfigError(
                f"{args.source}: is in the format {opened.format}, not {args.source_format}; leave "
                "out --from"
            )
        contents = opened.contents
        for warning in contents.warnings:
            complain(f"note: {warning}", 0)
        progress.reset(task, description=args.to, total=opened.nbytes)
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
    say(out, f"{result} ({args.to}), in {human_time(time.monotonic() - started)}")
    return 0


def _formats() -> ModuleType:
    try:
        from megatron_flashckpt.convert import formats
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("torch", "megatron"):
            raise
        raise UnsupportedError(
            f"{error.name} is not installed in this environment; run the conversion where "
            "Megatron-LM is installed (no GPU is needed)"
        ) from error
    return formats


def _path(text: str) -> Path:
    return Path(directory_argument(text))


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None or not int(match["number"]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write a size such as 500M or 4G")
    return int(match["number"]) * _UNITS[match["unit"].upper()]
