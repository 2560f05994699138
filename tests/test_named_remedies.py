"""Names in messages exist: options, commands and settings, and the values suggested for settings.

The tests read every string of the package except docstrings. A name that a message builds from a
variable is not checked.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import pytest
from megatron.training.arguments import add_megatron_arguments

from megatron_flashckpt.cli.commands import _parser
from megatron_flashckpt.config import Config
from tests.support.package_source import HOME, texts

#: Options of Megatron releases other than the installed one.
OTHER_RELEASES = {
    "--expert-tensor-parallel-num-weight-shards",
    "--freeze-all-layers",
    "--logits-save-dir",
    "--moe-use-legacy-grouped-gemm",
    "--offload-optimizer-states",
    "--override-ckpt-iteration",
    "--retro-add-retriever",
    "--standalone-embedding-stage",
    "--tensor-parallel-num-weight-shards",
    "--use-custom-fsdp",
    "--use-legacy-models",
}
#: Options of srun and torchrun, and the prefix that `agent.settings` adds to names.
OTHERS = {"--overlap", "--no-", "--max-restarts"}
#: Quoted words that are not settings: values, commands and Megatron's names.
WORDS = {"skip", "flashckpt", "release", "field", "dp_zero_gather_scatter", "fully_reshardable"}


STRINGS = [
    (place, node.value)
    for place, node in texts()
    if isinstance(node, ast.Constant) and isinstance(node.value, str)
]


def named(pattern: str) -> list[tuple[str, ...]]:
    """Return location and groups of every match of `pattern`."""
    return [
        (place, *match.groups()) for place, text in STRINGS for match in re.finditer(pattern, text)
    ]


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from parsers(below)


def options(parser: argparse.ArgumentParser) -> set[str]:
    return {option for subparser in parsers(parser) for option in subparser._option_string_actions}


def settings(kind: Any = Config, prefix: str = "") -> Iterator[str]:
    for field in msgspec.structs.fields(kind):
        yield prefix + field.name
        for below in (field.type, *get_args(field.type)):
            if isinstance(below, type) and issubclass(below, msgspec.Struct):
                yield from settings(below, f"{prefix}{field.name}.")


def test_every_option_named_in_a_message_exists() -> None:
    megatron = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(megatron)
    source = (HOME / "agent/__main__.py").read_text()
    of_agents = set(re.findall(r'add_argument\("(--[\w-]+)"', source))
    known = options(megatron) | options(_parser()) | of_agents | OTHER_RELEASES | OTHERS
    matches = named(r"(?<![\w-])(--[a-zA-Z][\w-]*)")
    assert len(matches) > 100
    assert [match for match in matches if match[1] not in known] == []


def test_every_command_named_in_a_message_exists() -> None:
    (commands,) = (
        match.choices
        for match in _parser()._actions
        if isinstance(match, argparse._SubParsersAction)
    )
    matches = named(r"['\"]flashckpt ([a-z]+)")
    assert len(matches) > 5
    assert [match for match in matches if match[1] not in commands] == []


def test_every_setting_named_in_a_message_exists() -> None:
    known = {*settings(), *WORDS}
    matches = named(r"(?<!\w)'([a-z]+(?:[._][a-z]+)*)'(?!\w)")
    assert len(matches) > 30
    assert [match for match in matches if match[1] not in known] == []


def test_every_value_named_for_a_setting_is_valid() -> None:
    matches = [match for match in named(r"'([a-z_]+): ([\w]+)'") if match[1] != "field"]
    assert len(matches) > 7
    for place, name, value in matches:
        given = {"true": True, "false": False}.get(value, value)
        try:
            msgspec.convert({name: given}, Config)
        except msgspec.ValidationError as error:
            pytest.fail(f"{place}: {name}: {value}: {error}")
        assert name in settings(), place
