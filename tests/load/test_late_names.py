"""Waits for names that come late, with a clock that the test owns."""

from __future__ import annotations

import pytest

from megatron_flashckpt.catalog.lineage import Facts, Save, Tracked
from megatron_flashckpt.file_format.file_names import run_name, save_name
from megatron_flashckpt.load.late_names import may_be_late, read_settled

RUN = run_name(1, "aaaa")
SAVES = [Save(iteration, save_name(RUN, iteration)) for iteration in (2, 4)]
SETTLED = Facts(4, Tracked(4, SAVES[1].save_id), {RUN: ()}, SAVES, numbers=[1])
LATE = Facts(2, SETTLED.tracked, {RUN: ()}, SAVES, numbers=[1])


@pytest.mark.parametrize(("wait_s", "expected"), [(60.0, SETTLED), (5.0, LATE), (0.0, LATE)])
def test_a_load_waits_for_what_it_knows_to_be_missing(wait_s: float, expected: Facts) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    facts = read_settled(
        lambda: SETTLED if now >= 30 else LATE, "/save", wait_s, lambda: now, sleep
    )
    assert facts == expected
    assert now == pytest.approx(min(wait_s, 30.0))


def test_a_load_that_misses_nothing_does_not_wait(caplog: pytest.LogCaptureFixture) -> None:
    def sleep(seconds: float) -> None:
        raise AssertionError(seconds)

    assert read_settled(lambda: SETTLED, "/save", 60.0, lambda: 0.0, sleep) == SETTLED
    assert caplog.messages == []


MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
40 22 0:35 / /mnt/shared rw,relatime - nfs4 server:/export rw,vers=4.2
41 22 0:36 / /mnt/shared\\040fast rw - lustre mgs@tcp:/fs rw
42 40 0:37 / /mnt/shared/scratch rw - xfs /dev/nvme0n1 rw
43 22 8:2 / /mnt/twice rw - ext4 /dev/sdb1 rw
44 43 0:38 / /mnt/twice rw - nfs server:/twice rw
45 40 0:39 / /mnt/shared/once rw - nfs server:/once rw
46 45 0:40 / /mnt/shared/once rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("root", "late"),
    [
        ("/data/save", False),
        ("/mnt/shared/save", True),
        ("/mnt/shared fast/save", True),
        ("/mnt/shared/scratch/save", False),
        ("/mnt/sharedness", False),
        # The later of two mounts at one point hides the earlier one.
        ("/mnt/twice/save", True),
        ("/mnt/shared/once/save", False),
        ("s3://bucket/save", False),
    ],
)
def test_names_are_late_only_on_file_systems_of_several_machines(root: str, late: bool) -> None:
    assert may_be_late(root, MOUNTS) == late
