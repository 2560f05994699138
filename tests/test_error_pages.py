"""Each heading of the page on errors is a message of the package, so a changed message is noticed.

A heading is code; `<...>` represents any field of an f-string or of a log message. A heading may be
a part of its message, provided that it contains the words for which users search.
"""

from __future__ import annotations

import ast
import difflib
import functools
import re
from pathlib import Path

from megatron_flashckpt.error_classes import TABLE
from tests.support.package_source import texts

REPO = Path(__file__).resolve().parents[1]
PAGE = REPO / "docs/reference/errors.md"
HOW_TO = sorted((REPO / "docs/how-to").glob("*.md"))
#: Represents a field in messages and in headings.
_FIELD = "\0"
_FIELDS = re.compile(f"{_FIELD}+")
_FORMAT = re.compile(r"%[-#0 +]*\d*(?:\.\d+)?[sdgrfx]")
_HEADING = re.compile(r"^### `(.+)`$", re.M)
#: Bold code in how-to pages: `- **`message`**: what it means`. Settings and flags have no space.
_QUOTED = re.compile(r"\*\*`([^`]+ [^`]+)`\*\*")


def headings() -> list[str]:
    return _HEADING.findall(PAGE.read_text())


def quoted() -> list[str]:
    """Return the messages that how-to pages quote."""
    return [message for page in HOW_TO for message in _QUOTED.findall(page.read_text())]


def normal(text: str) -> str:
    return _FIELDS.sub(_FIELD, " ".join(text.split()))


def of_heading(heading: str) -> str:
    return normal(re.sub(r"<[^<>]+>", _FIELD, heading))


def text_of(node: ast.AST) -> str | None:
    """Return a literal, or an f-string with its fields marked; None for any other `node`."""
    match node:
        case ast.Constant(value=str(text)):
            return normal(_FORMAT.sub(_FIELD, text))
        case ast.JoinedStr(values=parts):
            literals = (p.value if isinstance(p, ast.Constant) else _FIELD for p in parts)
            return normal("".join(map(str, literals)))
    return None


@functools.cache
def messages() -> dict[str, str]:
    """Return all strings of the package except docstrings, with the location of each."""
    located: dict[str, str] = {}
    for place, node in texts():
        if text := text_of(node):
            located.setdefault(text, place)
    return located


def is_in_a_message(heading: str) -> bool:
    wanted = of_heading(heading)
    return any(wanted in text for text in messages())


def nearest(heading: str) -> str:
    """Return the messages that resemble a heading most, as a help to correct the heading."""
    wanted = of_heading(heading)
    likely = difflib.get_close_matches(wanted, messages(), n=3, cutoff=0.3)
    shown = (f"{messages()[text]}: {text.replace(_FIELD, '<...>')}" for text in likely)
    return "\n  ".join(["nearest messages of the package:", *shown])


def test_every_heading_is_a_message_of_the_package() -> None:
    foreign = [heading for heading in headings() if not is_in_a_message(heading)]
    assert {heading: nearest(heading) for heading in foreign} == {}


def test_every_message_quoted_on_a_how_to_page_exists() -> None:
    assert len(quoted()) > 15
    foreign = [message for message in quoted() if not is_in_a_message(message)]
    assert {message: nearest(message) for message in foreign} == {}


def test_the_page_has_every_remedy_for_storage_errors() -> None:
    page = PAGE.read_text()
    assert [kind.remedy for kind in TABLE.values() if kind.remedy not in page] == []
