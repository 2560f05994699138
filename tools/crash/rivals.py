"""Cells of two jobs in one save directory: an agent hangs, another job takes over, the agent wakes.

The agents are real and have a runtime directory each; the trainers have no Megatron and run in this
process. The first job commits iteration 1, and its agent is stopped in the next save. The second
job takes over, resumes from the newest checkpoint, and commits iterations up to 5. Then the first
agent is woken. It may still create names of its own save; nothing of that counts, and no file of
the second job changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from pathlib import Path

from megatron_flashckpt.catalog.directory import read_facts
from megatron_flashckpt.catalog.lineage import Save, choose
from megatron_flashckpt.config import Retention
from megatron_flashckpt.file_format.file_names import (
    OWN,
    common_name,
    iteration_dir,
    save_name,
)
from megatron_flashckpt.storage.opening import open_store
from tests.agent.conftest import Node
from tests.support.stored import names_in, stored, tracked
from tests.support.trainer import FakeTrainer
from tools.crash import trouble
from tools.crash.family import AnyCell
from tools.crash.job import CellError, agent_at, eventually, wake
from tools.crash.peers import agent_fault
from tools.crash.roots import root_of
from tools.crash.truth import await_tidy, check_storage, committed

HUNG = "hung, overtaken, woken"
#: Hits that lie in the save of iteration 2, by failpoint. See `cells`. Signs of life hit `put.*` at
#: any time, so these points are left out: `commit.common` is right before the end is created.
COUNTS = {
    "persist.created": (2,),
    "persist.chunk": (2,),
    "persist.chunks": (2,),
    "persist.header": (2,),
    "file.synced": (2,),
    "persist.durable": (2,),
    "persist.record": (2,),
    "commit.ready": (2,),
    "commit.common": (2,),
    "commit.end": (2,),
    "commit.tracker": (2,),
    "commit.tracked": (2,),
    "commit.records": (2,),
    "commit.tidy": (2,),
    "retain.chosen": (1,),
    "retain.hidden": (1,),
    "retain.failed": (1,),
    "leftover.deleted": (1,),
    "commit.done": (2,),
    "save.marked": (2,),
    "upload.begun": (2,),
    "upload.chunk": (3,),
    "upload.whole": (2,),
}
FAILING = {"save.failed": (1,), "forget.file": (1,)}
#: Retention of the first job, which would remove iteration 1, and of the second job.
_FIRST, _SECOND = Retention(latest=1), Retention(latest=2)


@dataclasses.dataclass(frozen=True)
class RivalCell(AnyCell):
    """The first job's agent is stopped at the `count`th hit of `point`."""

    table = "two jobs"
    point: str
    count: int
    fails: bool = False
    """The common state of its iteration 2 cannot be stored."""

    def __str__(self) -> str:
        return f"two jobs: agent:{self.point}:{self.count}, {HUNG}"

    @property
    def in_buckets(self) -> bool:
        return not self.fails

    @property
    def place(self) -> tuple[tuple[str, str], str]:
        return ("agent, two jobs", self.point), HUNG

    def run(self, home: Path) -> None:
        first, second = Node(home / "first"), Node(home / "second")
        try:
            _run(self, home, first, second)
        finally:
            first.close()
            second.close()


def rival_cells() -> list[RivalCell]:
    """Return all cells of two jobs, on all storages."""
    return [
        RivalCell(point, count, fails)
        for points, fails in ((COUNTS, False), (FAILING, True))
        for point, counts in points.items()
        for count in counts
    ]


def _run(cell: RivalCell, home: Path, first: Node, second: Node) -> None:
    """Let the second job take over; fail if the first one then changes files of the second."""
    root, reached = root_of(home), home / "reached"
    config = first.config(answer_timeout_s=600.0)
    with agent_fault(f"agent:{cell.point}:{cell.count}:STOP:{reached}"):
        hung = first.trainer(root, config=config, retention=_FIRST)
    hung_run = hung.open_run()
    _saved(hung, 1)
    trouble.begin(root)  # earlier errors would shift the hits that `cell.count` counts
    blocking = Path(root) / iteration_dir(2) / common_name(save_name(hung_run.name, 2))
    if cell.fails:
        blocking.mkdir(parents=True)
    # In a thread, because the agent may stop before it answers.
    asking = threading.Thread(target=hung.stage, args=(2, hung.new_save_id()), daemon=True)
    asking.start()
    (agent,) = first.agents()
    stopped = agent_at(cell.point, agent, root, 2)

    if cell.fails:
        with contextlib.suppress(FileNotFoundError):
            blocking.rmdir()
    trouble.await_names(root)
    with agent_fault(None):  # cells run in parallel threads with one environment
        later = second.trainer(root, retention=_SECOND)
    newest = committed(root)[-1]
    resumed = Save(newest, stored(root, newest).manifest.save_id)
    run = later.open_run(resumed, policy="take_over").name
    for iteration in (3, 4, 5):
        if iteration == 5:
            trouble.end(root)
        _saved(later, iteration)
    eventually("retention", lambda: len(committed(root)) <= _SECOND.latest)
    await_tidy(root, 5)
    before = _listing(root)
    wake(stopped)
    asking.join()
    hung.outcome()
    error = hung.save(6).error
    if error is None or run not in error:
        raise CellError(f"the overtaken job got: {error}")
    changed = {name for name, _ in before ^ _listing(root) if hung_run.name not in name}
    if changed:
        raise CellError(f"the overtaken job changed {changed}")
    if (said := tracked(root)) != "5":
        raise CellError(f"the tracker says {said}")
    best = choose(read_facts(open_store(root))).candidates[0].save
    if (best.iteration, best.run) != (5, run):
        raise CellError(f"a load would take {best}")
    check_storage(root)
    for iteration in (6, 7):
        _saved(later, iteration)
    await_tidy(root, 7)
    check_storage(root)


def _saved(trainer: FakeTrainer, iteration: int) -> None:
    if error := trainer.save(iteration).error:
        raise CellError(f"iteration {iteration}: {error}")


def _listing(root: Path | str) -> set[tuple[str, int | bytes]]:
    """Return all files of checkpoints with their times, or all objects with their bytes."""
    names = [name for name in names_in(root) if not name.startswith(f"{OWN}/")]
    if isinstance(root, Path):
        return {(name, (root / name).lstat().st_mtime_ns) for name in names}
    return {(name, open_store(root).get(name)) for name in names}
