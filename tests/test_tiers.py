"""The tables of the tiers name files that exist, so that no renamed file changes its tier."""

from __future__ import annotations

from pathlib import Path

from tests.tiers import FIRST, FOLDERS, LONG, SECOND

HERE = Path(__file__).parent


def test_every_place_that_the_tables_name_exists() -> None:
    places = (*FOLDERS, *FIRST, *SECOND, *LONG)
    assert [place for place in places if not (HERE / place).exists()] == []
