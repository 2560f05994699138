"""Names of record files: their ranks and save, and names that are not valid."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flashckpt.file_format.file_names import (
    ranks_of_record,
    ranks_with_record,
    record_name,
    records_of,
    runs_of,
    save_id_in,
    save_id_of,
)
from megatron_flashckpt.storage.base import temporary_name

SAVE = "0123456789ab"


def test_a_record_s_name_has_a_stable_form() -> None:
    assert record_name(7, SAVE) == f"rank_00007-{SAVE}.commit"
    assert record_name(8, SAVE, 8) == f"ranks_00008-00015-{SAVE}.commit"


@given(st.integers(0, 10**6), st.integers(1, 2**16), st.sampled_from([SAVE, "f" * 32]))
def test_a_name_holds_its_ranks_and_its_save(first: int, count: int, save_id: str) -> None:
    name = record_name(first, save_id, count)
    assert ranks_of_record(name) == range(first, first + count)
    assert save_id_of(name) == save_id
    assert save_id_in(f"iter_0000001/{temporary_name(name)}") == save_id


@pytest.mark.parametrize(
    "name",
    [
        f"ranks_00003-00003-{SAVE}.commit",
        f"ranks_00003-00001-{SAVE}.commit",
        f"ranks_00000-99999999999-{SAVE}.commit",
        f"ranks_{'9' * 100}-{'9' * 100}-{SAVE}.commit",
        f"ranks_000000-00001-{SAVE}.commit",
        f"ranks_0-1-{SAVE}.commit",
        f"ranks_00001-{SAVE}.commit",
        f"rank_00000-00001-{SAVE}.commit",
        f"rank_0000001-{SAVE}.commit",
        f"ranks_\u0660\u0660\u0660\u0660\u0660-00001-{SAVE}.commit",
        f"ranks_00000-00001-{SAVE}.commit\n",
        f"ranks_00000-00001-{SAVE}.failed",
        f"ranks_00000-00001-{SAVE}.safetensors",
        f"ranks_-0001-00001-{SAVE}.commit",
        f"../ranks_00000-00001-{SAVE}.commit",
        "ranks_00000-00001-.commit",
        f".ranks_00000-00001-{SAVE}.commit.01234567.tmp",
    ],
)
def test_an_invalid_name_names_no_ranks(name: str) -> None:
    assert ranks_of_record(name) is None
    assert ranks_with_record([name], SAVE, 2**40) == set()


def test_records_of_a_save_have_its_id_and_ranks_of_the_job() -> None:
    names = [record_name(0, SAVE, 4), record_name(2, SAVE), record_name(4, SAVE, 4)]
    others = [record_name(4, "f" * 12, 2), record_name(0, SAVE, 5), "manifest.json"]
    assert records_of([*names, *others[:1], *others[2:]], SAVE, 8).keys() == set(names)
    assert ranks_with_record(names, SAVE, 8) == set(range(8))
    assert ranks_with_record([others[1]], SAVE, 4) == set(), "the job has only four ranks"


@given(st.sets(st.integers(0, 40)))
def test_runs_are_contiguous_maximal_and_in_order(ranks: set[int]) -> None:
    runs = runs_of(ranks)
    assert [rank for run in runs for rank in run] == sorted(ranks)
    assert all(one.stop < other.start for one, other in itertools.pairwise(runs))
