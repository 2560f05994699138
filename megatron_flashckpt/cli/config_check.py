"""`flashckpt config check`: the settings in effect, their origins, and whether a store works."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import secrets
from typing import Any

import msgspec
from rich.console import Console

from megatron_flashckpt.cli.console import busy, json_help, printable, save_argument, say
from megatron_flashckpt.config import Config, Origin, load_config, origins
from megatron_flashckpt.file_format.file_names import PROBES
from megatron_flashckpt.storage.opening import open_store
from megatron_flashckpt.storage.store import Store
from megatron_flashckpt.storage.store_probe import probe_store

_EPILOG = """\
exit status:
  0  the settings are valid, and saves can use DIR
  1  saves cannot use DIR: one line on stderr names the operation that failed, and the cure
  2  a setting or the URL is wrong
"""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One setting, as `config check --json` prints it."""

    name: str
    value: Any
    default: Any
    source: str
    """`default`, `file` or `variable`."""
    place: str | None
    """Path of the file or name of the variable; None for a default."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `config check` to the argparse subparsers `subparsers`."""
    config = subparsers.add_parser("config", help="check the settings").add_subparsers(
        required=True, metavar="COMMAND"
    )
    parser = config.add_parser(
        "check",
        help="print the settings in effect: defaults, then FILE, then environment variables; "
        "comments name each setting that is not a default, and its origin",
        description="Print the settings in effect: defaults, then FILE, then environment "
        "variables.\nComments name each setting that is not a default, and its origin. With "
        "--save,\nfirst try on the save directory what every node tries before a job's first step.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        type=_file,
        help="YAML file; default: the file that FLASHCKPT_CONFIG names",
    )
    parser.add_argument(
        "--save",
        type=save_argument,
        metavar="DIR",
        help="save directory (Megatron's --save), or its URL: write, create, read, list, replace "
        "and delete small files there, as a save does; nothing is left of them",
    )
    parser.add_argument("--json", action="store_true", help=json_help(list[Setting]))
    parser.set_defaults(run=run)


def _file(text: str) -> str:
    if not text.strip():  # an unset shell variable; the check would be of the defaults
        raise argparse.ArgumentTypeError(f"{text!r} names no file")
    return text


def run(args: argparse.Namespace, out: Console) -> int:
    """Print the settings: YAML that a job accepts, with comments, or JSON.

    Raises:
        StorageError: saves cannot use the save directory that was given.
    """
    config = load_config(args.file)
    if args.save is not None:
        with busy(f"trying {args.save}"):
            _try(open_store(args.save))
    settings = _settings(config, origins(args.file))
    if args.json:
        say(out, json.dumps(msgspec.to_builtins(settings), indent=2))
        return 0
    if args.save is not None:
        say(out, f"# Saves can use {printable(args.save, out.encoding)}.")
    changed = [setting for setting in settings if setting.value != setting.default]
    if changed:
        say(out, f"# {len(changed)} of {len(settings)} settings differ from their defaults:")
    else:
        say(out, f"# All {len(settings)} settings have their defaults.")
    for setting in changed:
        value, default = map(_one_line, (setting.value, setting.default))
        place = printable(setting.place or "", out.encoding)  # a line break would end the comment
        say(out, f"#   {setting.name}: {value} (default: {default}), from {place}")
    say(out, msgspec.yaml.encode(config).decode().rstrip())
    return 0


def _try(store: Store) -> None:
    """Do what a start does on every node (`save.probe`), and leave nothing."""
    name = f"{PROBES}/check-{secrets.token_hex(4)}"
    try:
        probe_store(store, name)
    finally:
        with contextlib.suppress(OSError):  # the error of the probe says more
            store.delete([name])


def _settings(config: Config, known: dict[str, Origin]) -> list[Setting]:
    return [
        Setting(
            name=name,
            value=_value(config, name),
            default=_value(Config(), name),
            source=origin.source,
            place=origin.place,
        )
        for name, origin in known.items()
    ]


def _value(config: Config, name: str) -> Any:
    return msgspec.to_builtins(functools.reduce(getattr, name.split("."), config))


def _one_line(value: Any) -> str:
    return msgspec.json.encode(value).decode()
