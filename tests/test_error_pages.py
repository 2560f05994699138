"""Each heading of the page on errors is a message of the package, so a changed message is noticed.

A heading is code; `<...>` represents any field of an f-string or of a log message. A heading may be
a part of its message, provided that it contains the words for which users search.
"""

from __future__ import annotations

import ast
import difflib
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_flashckpt import errors
from megatron_flashckpt.error_classes import TABLE
from megatron_flashckpt.errors import FlashCkptError, LayoutError

REPO = Path(__file__).resolve().parents[1]
PACKAGE = REPO / "megatron_flashckpt"
PAGE = REPO / "docs/reference/errors.md"
HOW_TO = sorted((REPO / "docs/how-to").glob("*.md"))
#: Represents a field in messages and in headings.
_FIELD = "\0"
_FIELDS = re.compile(f"{_FIELD}+")
_FORMAT = re.compile(r"%[-#0 +]*\d*(?:\.\d+)?[sdgrfx]")
_HEADING = re.compile(r"^### `(.+)`$", re.M)
#: Bold code in how-to pages: `- **`message`**: what it means`. Settings and flags have no space.
_QUOTED = re.compile(r"\*\*`([^`]+ [^`]+)`\*\*")
#: Least number of letters outside fields in a heading; a shorter one would match any message.
_LETTERS = 14
#: Errors that a user meets: each of their messages has a heading.
_CAUSED = tuple(
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, FlashCkptError) and kind is not LayoutError
)
#: Messages of these classes without a heading. A defective program or a test causes them, they are
#: only the reason in another message, or only the agent's log has them.
_INTERNAL = {
    "must be WHO:POINT:COUNT",
    "is not of this protocol",
    "before a slab was attached",
    "the agent answered",
    "the agent refused",
    "has no slot",
    "not STAGED",
    "may still write to this slab",
    "so the agent keeps it for a restart",
    "all the time; set 'runtime_dir'",
    "other agents",
    # Each ends with a cure from the table of error numbers.
    "cannot read (",
    f"cannot {_FIELD} (",
    # Reasons in a message on the probe of the save directory.
    "was written, but is not listed",
    "holds other bytes than written",
    # Found by agents alone, which have another source.
    "is not a marker of a committed save",
    "commit records of",
    # Refused before a slot is read, or a format is opened.
    "a slab",
    "is not a name inside",
    "give an iteration directory that Megatron saved with",
}


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
    texts: dict[str, str] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(file.read_text())
        documentation = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        for node in ast.walk(tree):
            text = None if id(node) in documentation else text_of(node)
            if text:
                texts.setdefault(text, f"{file.relative_to(REPO)}:{getattr(node, 'lineno', 0)}")
    return texts


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


def test_every_heading_has_words_to_search_for() -> None:
    words = {heading: of_heading(heading).replace(_FIELD, "") for heading in headings()}
    assert [heading for heading, text in words.items() if len(text) < _LETTERS] == []


@pytest.mark.parametrize(
    "heading", ["<file>: is not valid JSON (<reason>)", "unknown setting, and no such name"]
)
def test_a_heading_without_a_message_is_detected(heading: str) -> None:
    assert not is_in_a_message(heading)
    assert "nearest" in nearest(heading)


def test_no_heading_is_repeated() -> None:
    assert len(headings()) == len(set(headings())) > 100


def raised(kinds: tuple[type[FlashCkptError], ...]) -> Iterator[str]:
    """Yield the literal messages with which errors of these classes are raised."""
    names = {kind.__name__ for kind in kinds}
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
                continue
            if not isinstance(node.exc.func, ast.Name) or node.exc.func.id not in names:
                continue
            for argument in node.exc.args:  # the first of a StorageError is a number
                text = text_of(argument)
                if text and re.search(r"[a-z]", text):
                    yield text


def test_the_page_has_every_error_that_users_meet() -> None:
    """A new message needs a heading, or an entry among the internal messages."""
    listed = [of_heading(heading) for heading in headings()]
    lost = [
        text.replace(_FIELD, "<...>")
        for text in raised(_CAUSED)
        if not any(heading in text for heading in listed)
        and not any(words in text for words in _INTERNAL)
    ]
    assert lost == []


def test_the_page_has_every_remedy_for_storage_errors() -> None:
    page = PAGE.read_text()
    assert [kind.remedy for kind in TABLE.values() if kind.remedy not in page] == []
