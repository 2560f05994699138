"""All cells of one job in the crash matrix.

In each save of the job of `rank.py` the agent hits `persist.chunk` six times (two ranks, three
chunks), and the other failpoints of a shard twice. It hits the failpoints of a commit once, and
`put.*` six times (the node's record, common state, end, tracker, its twin, history). Each renewal
of the sign of life hits `put.*`, too, so these hits move from run to run. In a bucket `object.put`
takes their place, and `upload.chunk` is hit eight times: each shard has a header, too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from tools.crash.roots import PLAIN, is_hit
from tools.crash.story import KILLED, NODE, TRAINERS, Cell, Crash

SAVING = (
    "save.granted",
    "save.staging",
    "stage.half",
    "stage.copied",
    "stage.staged",
    "stage.rung",
)
LOADING = (
    "load.taken",
    "load.planned",
    "load.half",
    "load.filled",
    "load.unadopted",
    "load.adopted",
)
#: Failpoints of rank 0 alone, which opens the run.
OPENING = ("run.announced", "run.created")
#: Failpoints of the agent, and the hits at which it is killed: in the first save, and later.
_AGENT = {
    "agent.attached": (1, 2),
    "agent.granted": (1, 4),
    "agent.enqueued": (1, 4),
    "persist.created": (1, 4),
    "persist.chunk": (1, 3, 8, 11),
    "persist.chunks": (1, 4),
    "persist.header": (1, 4),
    "file.synced": (1, 4),
    "persist.durable": (1, 4),
    "persist.record": (1, 2),
    "put.written": (1, 2, 3, 4, 5, 6, 8, 9, 10),
    "put.renamed": (1, 2, 3, 4, 5, 6, 8, 9, 10),
    "commit.ready": (1, 3),
    "commit.common": (1, 3),
    "commit.end": (1, 3),
    "commit.tracker": (1, 3),
    "commit.tracked": (1, 3),
    "commit.records": (1, 3),
    "commit.tidy": (1, 3),
    "commit.done": (1, 3),
    "save.marked": (1, 3),
    "upload.begun": (1, 4),
    "upload.chunk": (1, 3, 5, 9, 15),
    "upload.whole": (1, 4),
    "object.put": (1, 2, 3, 4, 5, 6, 8, 9, 10),
}
_RETAINING = {
    "retain.chosen": (1,),
    "retain.hidden": (1,),
    "retain.failed": (1,),
    "leftover.deleted": (1,),
}
_FAILING = {"save.failed": (1,), "forget.file": (1, 2)}
#: Retention keeps every fourth checkpoint, so each commit removes an earlier checkpoint.
_RETAIN_INTERVAL = 4
#: Number of the save that fails, in cells that need a failed save.
_BROKEN = 2


def all_cells(seeds: int, storage: str = PLAIN) -> list[Cell]:
    """Return the cells of the full matrix, and one random cell for each of `seeds`."""
    fixed = [*_of_the_agent(), *_of_leftovers(), *_of_trainers(), *_of_loads()]
    cells = [cell for cell in fixed if all(is_hit(crash.point, storage) for crash in cell.crashes)]
    return [*cells, *(_random(seed, storage) for seed in range(seeds))]


def _cell(*crashes: Crash, **more: int) -> Cell:
    # Alternate: the next saves repeat the interrupted iterations, or skip to later ones.
    step = 1 + 2 * (sum(crash.count for crash in crashes) % 2)
    return Cell(crashes, step=step, **more)  # type: ignore[arg-type]


def _of_the_agent() -> Iterator[Cell]:
    for points, more in (
        (_AGENT, {}),
        (_RETAINING, {"retain_interval": _RETAIN_INTERVAL}),
        (_FAILING, {"broken": _BROKEN}),
    ):
        for point, counts in points.items():
            for count in counts:
                for killed in KILLED:
                    yield _cell(Crash("agent", point, count, killed), **more)


def _of_leftovers() -> Iterator[Cell]:
    """Yield cells in which the second run ends a save that the first one left without an end."""
    for killed in KILLED:
        first = Crash("agent", "persist.durable", 4, NODE)
        yield _cell(first, Crash("agent", "leftover.ended", 1, killed))


def _of_trainers() -> Iterator[Cell]:
    for rank in ("rank0", "rank1"):
        for killed in KILLED:
            for point in SAVING:
                for count in (1, 3):
                    yield _cell(Crash(rank, point, count, killed))
            yield _cell(Crash(rank, "save.told", 2, killed))  # DURABLE
            yield _cell(Crash(rank, "save.told", _BROKEN + 1, killed), broken=_BROKEN)  # FAILED


def _of_loads() -> Iterator[Cell]:
    """Yield cells that also interrupt the load, from memory and from storage."""
    for before in (TRAINERS, NODE):
        for rank in ("rank0", "rank1"):
            for point in (*LOADING, *(OPENING if rank == "rank0" else ())):
                if (before, point) == (NODE, "load.half"):
                    continue  # ranks exchange pieces only when they load from memory
                for killed in KILLED:
                    first = Crash("rank0", "save.told", 2, before)
                    yield _cell(first, Crash(rank, point, 1, killed))


def _random(seed: int, storage: str) -> Cell:
    """Return two or three crashes of a job that does not wait for its saves."""
    draw = random.Random(seed)
    crashes: list[Crash] = []
    agent_is_new = True
    for _ in range(draw.choice((2, 3))):
        killed = draw.choice(KILLED)
        # An agent reads its fault when it starts, so only a new agent can get one.
        if agent_is_new and draw.random() < 0.7:
            points = [item for item in _AGENT.items() if is_hit(item[0], storage)]
            point, counts = draw.choice(points)
            crash = Crash("agent", point, draw.choice(counts), killed)
        else:
            point = draw.choice(SAVING)
            crash = Crash(f"rank{draw.randrange(2)}", point, draw.randint(1, 4), killed)
        crashes.append(crash)
        agent_is_new = killed == NODE
    return Cell(
        tuple(crashes),
        seed=seed,
        step=draw.choice((1, 3)),
        hurried=True,
        retain_interval=draw.choice((None, 3)),
    )
