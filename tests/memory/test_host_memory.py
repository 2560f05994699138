"""Available memory: the free memory of the node, or of the tightest control group."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_flashckpt.memory.host_memory import Limit, available_nbytes, limits

GIB = 2**30
GROUPS = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Make the files in which the kernel describes a node of 8 GiB."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    8388608 kB\n")
    return tmp_path


def group(root: Path, limit: object, used: int, cache: int, *, version: int = 2) -> None:
    root.mkdir(parents=True, exist_ok=True)
    names = {1: ("limit_in_bytes", "usage_in_bytes", "total_"), 2: ("max", "current", "")}[version]
    (root / f"memory.{names[0]}").write_text(f"{limit}\n")
    (root / f"memory.{names[1]}").write_text(f"{used}\n")
    (root / "memory.stat").write_text(f"anon 5\n{names[2]}inactive_file {cache}\n")


def available(made: Path, cgroup: str | None) -> int:
    if cgroup is not None:
        (made / "proc/self/cgroup").write_text(cgroup)
    return available_nbytes(made / "proc", made / "groups")


def test_without_a_limiting_group_the_kernel_s_estimate_counts(made: Path) -> None:
    assert available(made, None) == 8 * GIB
    assert available(made, "0::/\n1:cpu:/a\n") == 8 * GIB
    group(made / "groups/job", "max", 7 * GIB, 0)
    group(made / "groups/job/step", 100 * GIB, GIB, 0)
    assert available(made, "0::/job/step\n") == 8 * GIB


def test_the_tightest_group_of_the_process_counts_without_its_cache(made: Path) -> None:
    group(made / "groups/job", 4 * GIB, 3 * GIB, GIB)
    group(made / "groups/job/step", 6 * GIB, GIB, 0)
    group(made / "groups/other", GIB, GIB, 0)
    group(made / "groups/full", GIB, 2 * GIB, 0)
    assert available(made, "0::/job/step\n") == 2 * GIB
    assert available(made, "0::/full\n") == 0


def test_in_a_container_the_root_of_the_mount_counts(made: Path) -> None:
    group(made / "groups/memory", 3 * GIB, GIB, 0, version=1)
    assert available(made, "4:cpu,memory:/docker/abc\n0::/\n") == 2 * GIB


@pytest.fixture
def real_group() -> Iterator[Path]:
    path = GROUPS / f"flashckpt-{uuid.uuid4().hex[:8]}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield path
    path.rmdir()


def test_a_real_control_group_refuses_a_slab_and_kills_no_process(
    real_group: Path,
) -> None:
    try:
        (real_group / "memory.limit_in_bytes").write_text(str(GIB // 2))
    except OSError as error:
        pytest.skip(f"no limit can be set here: {error}")
    code = "from megatron_flashckpt.memory.slab import Slab; Slab.create(2, 4096, 2**29, '0')"
    done = subprocess.run(
        ["sh", "-c", f'echo $$ > {real_group}/cgroup.procs && exec {sys.executable} -c "{code}"'],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    if "cgroup.procs" in done.stderr:
        pytest.skip(f"no process can join a control group here: {done.stderr}")
    assert done.returncode == 1, "the process was killed"
    assert "cannot reserve 1.0 GiB of host memory for 2 checkpoint slots" in done.stderr


def test_a_limit_has_the_same_key_in_all_containers_of_a_machine(made: Path) -> None:
    assert limits(made / "proc", made / "groups")[0].key == platform.node(), "without a boot id"
    (made / "proc/sys/kernel/random").mkdir(parents=True)
    (made / "proc/sys/kernel/random/boot_id").write_text("b00d\n")
    (made / "proc/self/cgroup").write_text("0::/pod/step\n")
    group(made / "groups/pod", 6 * GIB, GIB, 0)
    outside = limits(made / "proc", made / "groups")
    inode = (made / "groups/pod").stat().st_ino
    assert outside == [
        Limit("b00d", "the machine", 8 * GIB),
        Limit(f"b00d 2 {inode}", f"control group {made}/groups/pod", 5 * GIB),
    ]
    # In a container, the same group is the root.
    (made / "proc/self/cgroup").write_text("0::/\n")
    inside = limits(made / "proc", made / "groups/pod")
    assert [(limit.key, limit.left_nbytes) for limit in inside] == [
        (limit.key, limit.left_nbytes) for limit in outside
    ]
