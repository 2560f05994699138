"""Writes the generated pages of `docs/reference/`: `python -m tools.reference_pages`.

`configuration.md` is generated from the settings' classes and the texts below their fields,
`command-line.md` from the parser of `flashckpt`. `test_docs.py` checks that both are up to date.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect as types

from megatron_flashckpt.agent_config import MOST
from megatron_flashckpt.cli import commands
from megatron_flashckpt.config import PREFIX, Config

DIRECTORY = Path(__file__).resolve().parents[1] / "docs/reference"
NOTE = "<!-- Written by `python -m tools.reference_pages`: edit the code, not this page. -->"
CONFIGURATION = f"""\
{NOTE}

# Configuration

No configuration is needed: every field has a default. To change fields, write a YAML file and name
it in `FLASHCKPT_CONFIG`, or set one variable per field. Variables win over the file. A nested field
has a double underscore in its variable: `FLASHCKPT_AGENT__GRACE_S=60` sets `agent.grace_s`. The
value of a variable is written as in YAML.

```yaml
slots: 3
agent:
  grace_s: 60
```

No number may be above 1 000 000 000. Where a text says `None`, YAML says `null`. A name or a value
that is not accepted stops the job before its first step, with a message that names the field.
`flashckpt config check FILE` prints the settings that would be in effect, and names those that are
not defaults with the file or variable that each comes from. The folder `configs/` of the
repository has files for common cases: a slow shared file system, several nodes, scarce host
memory, and others.

## Fields
"""
COMMAND_LINE = f"""\
{NOTE}

# Command line

`flashckpt` needs no GPU, and only `convert` needs torch and megatron-core. Results go to standard
output, and an error is one line on standard error. No row of a table is folded: a terminal gets the
columns that fit, a pipe gets all columns. Work of more than a second shows its progress on a
terminal.

| exit status | meaning |
|---|---|
| 0 | success |
| 1 | damage was found, or what was asked for does not exist or could not be done |
| 2 | wrong usage, or a wrong configuration |
| 130 | interrupted (Ctrl-C) |

`DIR` is the save directory: what Megatron's `--save` names. A job may train there meanwhile. Only
`prune` refuses then.

With `--json` standard output is one JSON document and nothing else. The table of a command names
its fields, whose names change only as those of [settings](versions.md#configuration) do. Points in
time are seconds since 1970, and sizes are bytes. After an error standard output is empty. Damage
that `verify` finds, a checkpoint that `prune` cannot remove, and a `plan` for which the memory does
not suffice are results and stand in the document.

These three start the same script with the arguments `ARGS` through the launcher:

    torchrun TORCHRUN-OPTIONS -m megatron_flashckpt.launch pretrain_gpt.py ARGS
    python -m megatron_flashckpt.launch pretrain_gpt.py ARGS
    flashckpt-launch pretrain_gpt.py ARGS

`-m MODULE` instead of the script runs a module, as `python -m MODULE` does.
"""


def configuration() -> str:
    return "\n".join([CONFIGURATION, *_section(Config, "")])


def _section(
    struct: type[msgspec.Struct], prefix: str, with_variables: bool = True
) -> Iterator[str]:
    """Yield the lines of all fields of `struct`, with the fields of nested sections last.

    Args:
        with_variables: False: a variable sets the whole section, not its fields.
    """
    meanings = _field_texts(struct)
    nested = []
    for field in types.type_info(struct).fields:  # type: ignore[attr-defined]
        key = prefix + field.name
        default = _default(field)
        if isinstance(field.type, types.StructType):
            nested.append((field.type.cls, key, True))
            continue
        yield f"### {key}\n"
        shown = "required" if default is msgspec.NODEFAULT else f"default `{_yaml(default)}`"
        facts = [_kind(field.type, default), shown]
        if with_variables:
            facts.append(f"`{PREFIX}{key.replace('.', '__').upper()}`")
        yield f"*{'; '.join(facts)}*\n"
        yield meanings[field.name] + "\n"
        for member in getattr(field.type, "types", ()):
            if isinstance(member, types.StructType):
                nested.append((member.cls, key, False))
    for cls, key, settable in nested:
        yield f"## Section {key}\n"
        yield _paragraphs(cls.__doc__ or "") + "\n"
        yield from _section(cls, f"{key}.", settable)


def _default(field: Any) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def _field_texts(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return the string below each field in the source of the class and of its base classes."""
    texts: dict[str, str] = {}
    for cls in reversed(struct.__mro__):
        if cls in (object, msgspec.Struct) or not issubclass(cls, msgspec.Struct):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                assert isinstance(text.value, ast.Constant)
                assert isinstance(field.target, ast.Name)
                texts[field.target.id] = _paragraphs(str(text.value.value))
    return texts


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n"))


def _kind(kind: types.Type, default: Any) -> str:
    """Describe in words the values that a field takes, its default first."""
    match kind:
        case types.UnionType():
            return " or ".join(_kind(member, default) for member in kind.types)
        case types.IntType() | types.FloatType():
            noun = "whole number" if isinstance(kind, types.IntType) else "number"
            bounds = [
                f"{word} {bound:,}".replace(",", " ")
                for word, bound in (("at least", kind.ge), ("at most", kind.le))
                if bound not in (None, MOST)
            ]
            return f"{noun} ({', '.join(bounds)})" if bounds else noun
        case types.LiteralType():
            values = sorted(kind.values, key=lambda value: value != default)
            return " or ".join(f"`{value}`" for value in values)
        case types.StructType():
            return "a section"
        case types.VarTupleType():
            return "list of text"
    words = {types.BoolType: "`true` or `false`", types.StrType: "text", types.NoneType: "`null`"}
    return words[type(kind)]


def _yaml(value: Any) -> str:
    return msgspec.yaml.encode(value).decode().removesuffix("\n...\n").strip()


def command_line() -> str:
    return "\n".join([COMMAND_LINE, *_command(commands._parser(), "")])


def _command(parser: argparse.ArgumentParser, summary: str) -> Iterator[str]:
    """Yield the lines of a command, or of its subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            summaries = {choice.dest: choice.help for choice in action._choices_actions}
            for name, below in action.choices.items():
                yield from _command(below, summaries.get(name) or summary)
            return
    yield f"## {parser.prog}\n"
    yield _sentence(parser.description or summary) + "\n"
    actions = [action for action in parser._actions if action.dest != "help"]
    yield textwrap.indent(_usage(parser, actions), "    ") + "\n"
    if actions:
        yield "| argument | meaning |"
        yield "|---|---|"
        expand: Callable[[argparse.Action], str] = parser._get_formatter()._expand_help
        for action in actions:
            meaning = expand(action) if action.help else ""
            if action.choices:
                meaning = f"one of {', '.join(f'`{c}`' for c in action.choices)}; {meaning}"
            if action.required and action.option_strings:
                meaning = f"required; {meaning}"
            yield f"| `{_spelled(action, '`, `')}` | {meaning} |"
        yield ""
    if parser.epilog:
        title, _, lines = parser.epilog.partition("\n")
        yield _sentence(title.rstrip(":")).rstrip(".") + ":\n"
        yield textwrap.indent(textwrap.dedent(lines).rstrip(), "    ") + "\n"


def _usage(parser: argparse.ArgumentParser, actions: list[argparse.Action]) -> str:
    """Return the usage in one or more lines; argparse's own breaks depend on Python's version."""
    words = [parser.prog]
    groups = {group._group_actions[0]: group for group in parser._mutually_exclusive_groups}
    grouped = {action for group in groups.values() for action in group._group_actions[1:]}
    for action in sorted(actions, key=lambda action: not action.option_strings):
        if action in grouped:
            continue
        group = groups.get(action)
        spelled = " | ".join(
            _spelled(member, " | ") for member in (group._group_actions if group else [action])
        )
        if group and group.required:
            words.append(f"({spelled})")
        elif group or not action.required or action.nargs in ("?", "*"):
            words.append(f"[{spelled}]")
        else:
            words.append(spelled)
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) > 92:
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)


def _spelled(action: argparse.Action, between: str) -> str:
    metavar = str(action.metavar or "")
    if action.option_strings:
        takes = action.nargs != 0
        value = metavar or action.dest.upper()
        return between.join(
            f"{option} {value}" if takes else option for option in action.option_strings
        )
    return metavar or action.dest.upper()


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


PAGES = {"configuration.md": configuration, "command-line.md": command_line}


def main() -> None:
    for name, page in PAGES.items():
        (DIRECTORY / name).write_text(page())


if __name__ == "__main__":
    main()
