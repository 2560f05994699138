"""Consistency of the documents: links, the list of pages, generated pages, names of files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_flashckpt import config
from megatron_flashckpt.config import Config, load_config
from megatron_flashckpt.failpoints import VARIABLE as FAULT_VARIABLE
from tests.test_imports import LAYERS
from tools import reference_pages

REPO = Path(__file__).resolve().parents[1]
DOCS = REPO / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
#: Documents that are read alone, or on a code hosting site.
FILES = [REPO / "README.md", REPO / "CONTRIBUTING.md", REPO / "SECURITY.md"]
DOCUMENTS = [*(file for file in FILES if file.exists()), *PAGES]
_CODE = re.compile(r"^```.*?^```$|^    .*?$|`[^`\n]*`", re.M | re.S)
_LINK = re.compile(r"\]\(\s*([^)\s]+)\s*\)")
_HEADING = re.compile(r"^#+ +(.+?)\s*$", re.M)


def named(document: Path) -> str:
    return str(document.relative_to(REPO))


def links(text: str) -> list[str]:
    """Return the targets of all links and images in a page."""
    return _LINK.findall(_CODE.sub("", text))


def anchors(page: Path) -> set[str]:
    """Return the anchors of `page`'s headings that exist on the site and on a hosting site."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    both = set()
    for heading in _HEADING.findall(text):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
        hosted = re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")
        if hosted == re.sub(r"[-\s]+", "-", hosted):
            both.add(hosted)
    return both


def problem(document: Path, link: str) -> str | None:
    """Return the defect of a link, or None."""
    if link.startswith(("https://", "mailto:")):
        return None
    path, _, anchor = link.partition("#")
    target = (document.parent / path).resolve() if path else document
    if not target.exists():
        return "names no file"
    if document.is_relative_to(DOCS) and not target.is_relative_to(DOCS):
        return "leaves docs/, which the site does not have: name the file as code"
    if anchor and anchor not in anchors(target):
        return "names no heading"
    return None


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_link_resolves(document: Path) -> None:
    problems = {link: problem(document, link) for link in links(document.read_text())}
    assert {link: reason for link, reason in problems.items() if reason} == {}


def test_the_list_of_pages_has_every_page_once() -> None:
    nav = msgspec.yaml.decode((REPO / "mkdocs.yml").read_bytes())["nav"]
    listed = sorted(listed_pages(nav))
    assert listed == sorted(str(page.relative_to(DOCS)) for page in PAGES)


def test_the_page_for_emergencies_links_every_part_of_the_page_on_errors() -> None:
    page = (DOCS / "how-to/three-am.md").read_text()
    parts = re.findall(r"^## (.+)$", (DOCS / "reference/errors.md").read_text(), re.M)
    linked = {link.partition("#")[2] for link in links(page) if "errors.md#" in link}
    assert len(parts) > 10
    assert linked == {re.sub(r"[^\w\- ]", "", part.lower()).replace(" ", "-") for part in parts}


def listed_pages(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from listed_pages(entry)


def test_the_sites_pictures_are_those_of_the_results() -> None:
    """The site has only what is in docs/, so it has copies."""
    pictures = sorted((DOCS / "images").iterdir())
    assert pictures
    for picture in pictures:
        drawn = REPO / "benchmarks/results" / picture.name
        assert picture.read_bytes() == drawn.read_bytes(), f"cp {drawn} {picture}"


@pytest.mark.parametrize("name", reference_pages.PAGES)
def test_generated_pages_are_up_to_date(name: str) -> None:
    written = (reference_pages.DIRECTORY / name).read_text()
    assert written == reference_pages.PAGES[name](), "run python -m tools.reference_pages"


def test_every_variable_of_the_configuration_page_takes_its_default() -> None:
    page = (reference_pages.DIRECTORY / "configuration.md").read_text()
    shown = re.findall(r"default `([^`]+)`; `(FLASHCKPT_\w+)`", page)
    assert len(shown) > 40
    for default, variable in shown:
        assert load_config(None, {variable: default}) == Config(), variable


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_file_of_the_repository_that_a_page_names_exists(document: Path) -> None:
    folders = "tests|tools|scripts|configs|patches|benchmarks|examples"
    paths = re.findall(rf"`((?:{folders})/[\w./]*[\w/])", document.read_text())
    assert [path for path in paths if not (REPO / path).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_every_command_and_setting_that_a_page_names_exists(document: Path) -> None:
    text = document.read_text()
    page = (reference_pages.DIRECTORY / "command-line.md").read_text()
    known = {title.split()[0] for title in re.findall(r"^## flashckpt (.+)$", page, re.M)}
    assert set(re.findall(r"(?:^ *|`|\$ |&& )flashckpt ([a-z]+(?:-[a-z]+)*)", text, re.M)) <= known
    fields = set(config._FIELDS)
    sections = r"`((?:agent|replicated|retention|trace)\.[a-z_]+)[`:]"
    assert set(re.findall(sections, text)) <= fields
    variables = {"FLASHCKPT_" + field.replace(".", "__").upper() for field in fields}
    named_here = {name.rstrip("_") for name in re.findall(r"\bFLASHCKPT_[A-Z_]+", text)}
    assert named_here <= {*variables, config.FILE_VARIABLE, FAULT_VARIABLE, "FLASHCKPT"}


def test_the_architecture_page_shows_the_layers_of_imports() -> None:
    text = (DOCS / "understanding/architecture.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", text, re.M)
    shown = [(int(level), set(re.findall(r"`(\w+)`", units))) for level, units in rows]
    expected = [{unit or "__init__" for unit in layer} for layer in LAYERS]
    assert shown == list(enumerate(expected, 1))[::-1]


def test_the_page_on_benchmarks_lists_every_study() -> None:
    code = "".join(file.read_text() for file in sorted((REPO / "benchmarks").rglob("*.py")))
    studies = re.findall(r'Study\(\s*(?:name=)?"(\w+)"', code)
    table = (DOCS / "understanding/benchmarks.md").read_text().partition("| study |")[2]
    shown = re.findall(r"^\| `(\w+)` \|", table.partition("\n\n")[0], re.M)
    assert sorted(shown) == sorted(studies)
