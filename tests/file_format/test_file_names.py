"""File names: a save's files carry its name, sort by it, and cannot be mistaken for others."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_flashckpt.file_format.file_names import (
    common_name,
    due_name,
    end_name,
    ends_in,
    iteration_dir,
    next_attempt,
    parse_iteration_dir,
    parse_run_file,
    parse_save,
    ranks_with_record,
    record_name,
    records_of,
    run_file,
    run_name,
    run_number,
    run_of,
    runs_of,
    save_name,
    save_of,
    shard_name,
)
from megatron_flashckpt.storage.posix_files import temporary_name

SAVE = "000008-3fa9.00003.1"
OTHER = "000008-3fa9.00003.12"

nonces = st.integers(0, 0xFFFF).map(lambda number: f"{number:04x}")
saves = st.builds(
    lambda number, nonce, sequence, attempt: save_name(run_name(number, nonce), sequence, attempt),
    st.integers(1, 10**9),
    nonces,
    st.integers(0, 10**7),
    st.integers(1, 10**6),
)


def test_names_have_a_stable_form() -> None:
    assert save_name(run_name(8, "3fa9"), 3) == SAVE
    assert shard_name(7, SAVE) == f"{SAVE}.rank_00007.safetensors"
    assert record_name(range(8, 16), SAVE) == f"{SAVE}.ranks_00008-00015.record"
    assert common_name(SAVE) == f"{SAVE}.common.msgpack"
    assert end_name(SAVE) == f"{SAVE}.end"
    assert run_file(8) == "flashckpt/runs/000008.json"


@given(saves)
def test_a_save_s_name_holds_its_run_sequence_and_attempt(save_id: str) -> None:
    parsed = parse_save(save_id)
    assert parsed is not None
    assert save_name(parsed.run, parsed.sequence, parsed.attempt) == save_id
    assert (run_of(save_id), run_number(parsed.run)) == (parsed.run, parsed.number)
    again = parse_save(next_attempt(save_id))
    assert again == parsed._replace(attempt=parsed.attempt + 1)
    assert parse_run_file(run_file(parsed.number).rpartition("/")[2]) == parsed.number


@given(saves, st.integers(0, 10**6), st.integers(1, 2**16))
def test_each_file_of_a_save_names_it(save_id: str, first: int, count: int) -> None:
    ranks = range(first, first + count)
    record = record_name(ranks, save_id)
    common, due, end = common_name(save_id), due_name(save_id), end_name(save_id)
    for name in (record, shard_name(first, save_id), common, due, end):
        assert save_of(name) == save_id
        assert save_of(temporary_name(name)) is None
    assert records_of([record], save_id, ranks.stop) == {record: ranks}


@pytest.mark.parametrize(
    "name",
    [
        *(
            f"{SAVE}.{rest}"
            for rest in (
                *("ranks_00003-00001.record", "ranks_00000-99999999999.record"),
                *("ranks_0-1.record", "ranks_00001.record", "rank_00000.record"),
                *("ranks_\u0660\u0660\u0660\u0660\u0660-00001.record", "ranks_-0001-00001.record"),
                *("ranks_00000-00001.record\n", "ranks_00000-00001.safetensors"),
                f"ranks_{'9' * 100}-{'9' * 100}.record",
            )
        ),
        f"../{SAVE}.ranks_00000-00001.record",
        f".{SAVE}.ranks_00000-00001.record.01234567.tmp",
        record_name(range(2), OTHER),
    ],
)
def test_an_invalid_name_names_no_ranks(name: str) -> None:
    assert ranks_with_record([name], SAVE, 2**40) == set()


def test_records_of_a_save_have_its_name_and_ranks_of_the_job() -> None:
    names = [record_name(ranks, SAVE) for ranks in (range(4), range(2, 3), range(4, 8))]
    others = [record_name(range(4, 6), OTHER), "manifest.json"]
    assert records_of([*names, *others], SAVE, 8).keys() == set(names)
    assert ranks_with_record(names, SAVE, 8) == set(range(8))
    too_many = record_name(range(5), SAVE)
    assert ranks_with_record([too_many], SAVE, 4) == set(), "the job has only four ranks"


def test_the_ends_of_a_directory_come_the_latest_first() -> None:
    ends = ["000010-0000.00001.1", OTHER, SAVE, "000008-3fa9.00002.1"]
    names = [end_name(save) for save in reversed(ends)]
    assert ends_in([*names, "weekend.end", ".end", shard_name(0, SAVE)]) == ends


@given(st.sets(st.integers(0, 40)))
def test_runs_are_contiguous_maximal_and_in_order(ranks: set[int]) -> None:
    runs = runs_of(ranks)
    assert [rank for run in runs for rank in run] == sorted(ranks)
    assert all(one.stop < other.start for one, other in itertools.pairwise(runs))


@given(st.integers(0, 10**12))
def test_iteration_directories_have_megatron_s_names_and_can_be_parsed(iteration: int) -> None:
    name = iteration_dir(iteration)
    assert name == "iter_" + str(iteration).rjust(7, "0")
    assert parse_iteration_dir(name) == iteration


@pytest.mark.parametrize(
    "name",
    [
        *("", "iter_", "iter_12", "iter_00000012", "iter_000000\u0667", "iter_-000001"),
        *("iter_0000007.tmp", "xiter_0000007", "release"),
    ],
)
def test_other_directories_have_no_iteration(name: str) -> None:
    assert parse_iteration_dir(name) is None
