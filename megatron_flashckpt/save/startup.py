"""What happens once, before the first training step: check, say what will happen, reserve memory.

Doors lead here at different moments. A load is the first occasion, if there is one; else the first
training step, whose function is replaced for it: by the launcher at once, and where only imports
were swapped by the first call of `maybe_finalize_async_save`, right before that step; or, in
releases before core 0.7, which have no such call, of what Megatron calls in its place.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import time
from typing import Any

import msgspec
import torch
import xxhash
from megatron.core import package_info

import megatron_flashckpt
from megatron_flashckpt.agent.run_messages import BeginRun
from megatron_flashckpt.agent.save_directory import ensure
from megatron_flashckpt.agent.socket_dir import agent_directory
from megatron_flashckpt.collectives import gather_objects, reduce_int, together
from megatron_flashckpt.config import Retention
from megatron_flashckpt.errors import FlashCkptError, StorageError
from megatron_flashckpt.layout.completeness import Tally, tally
from megatron_flashckpt.layout.piece import MASTER, WEIGHT, Piece
from megatron_flashckpt.megatron_lm import parallel, self_check, stock
from megatron_flashckpt.megatron_lm.accounting import has_states
from megatron_flashckpt.megatron_lm.compat import exists, has_async_utils
from megatron_flashckpt.megatron_lm.job_flags import captures_graphs, changes_beside_steps
from megatron_flashckpt.megatron_lm.model_geometry import ModelGeometry
from megatron_flashckpt.megatron_lm.model_state import ModelState
from megatron_flashckpt.megatron_lm.size_estimate import Expected, expect
from megatron_flashckpt.memory.host_memory import shown
from megatron_flashckpt.save import node_memory, probe
from megatron_flashckpt.save.agent_link import slab_nbytes
from megatron_flashckpt.save.checkpointer import Checkpointer
from megatron_flashckpt.save.node_memory import Need
from megatron_flashckpt.save.session import session
from megatron_flashckpt.storage.opening import open_storage

#: Sums of as many remainders as there can be ranks stay below 2**63.
_PRIME = 2**45 - 55
#: Seconds that agents have to write and free memory of an earlier run, if the node lacks it.
_RELEASE_S = 60.0
#: What Megatron's `train` calls before every step, in every release.
_BEFORE_STEP = "update_num_microbatches"


def check(model: list[Any], optimizer: Any) -> None:
    """Raise on all ranks if a rank has what would not be saved, unless this was checked before.

    Collective. Jobs that do not save have nothing to fear.

    Raises:
        UnsupportedError: names all that differs from what we expect.
        AgentError: this node has no place for an agent.
    """
    margs = stock.checkpointing().get_args()
    if not margs.save or _is_checked(margs, model, optimizer):
        return
    keys = together(lambda: _check_own(margs, model, optimizer))
    state = session.checkpointer(margs.save).model_state
    # One number first: nearly always no rank has FP8 or FP4 weights, or lacks the nodes.
    wants = reduce_int(bool(keys) or state.lacks_nodes, "max")
    everyone = gather_objects((keys, _node(margs))) if wants else []
    quantized = frozenset[str]().union(*(theirs for theirs, _ in everyone))
    state.note_quantized(quantized)
    if everyone:
        session.note_nodes([node for _, node in everyone])
    if quantized:
        together(lambda: _check_derived(state, *_saved(margs, model, optimizer)))


def check_alone(model: list[Any], optimizer: Any) -> None:
    """Do the checks of `check` on this rank alone, for saves before any load or training step.

    All that `begin` does is left to the first of these.
    """
    margs = stock.checkpointing().get_args()
    if _is_checked(margs, model, optimizer, alone=True):
        return
    keys = _check_own(margs, model, optimizer)
    agreed = session.checkpointer(margs.save).model_state.quantized_keys
    if not keys <= agreed and parallel.model_cut()[1] > 1:
        raise self_check.refusal(
            [
                "the stages of a pipeline have not agreed on their FP8 or FP4 weights: call "
                "load_checkpoint or Megatron's train_step before the first save"
            ]
        )
    _note_checked(margs, model, optimizer, alone=True)


def claim() -> None:
    """Become the writer of the save directory, unless this run is that already. Collective.

    Raises:
        OtherWriterError: another run writes there; nothing was changed.
    """
    margs = stock.checkpointing().get_args()
    if margs.save and not getattr(margs, "skip_train", False):
        session.checkpointer(margs.save).claim()


def begin(model: list[Any], optimizer: Any) -> None:
    """Check all, say on rank 0 what will happen, and reserve the memory in the background.

    Collective; does nothing for a model and optimizer that it was called for before.

    Raises:
        UnsupportedError: as `check`; or some element would be saved not at all, or twice.
        OtherWriterError: as `claim`.
        StorageError: the slabs of a node's ranks do not fit into its memory together, or the save
            directory cannot hold checkpoints.
    """
    margs = stock.checkpointing().get_args()
    if not margs.save or _is_checked(margs, model, optimizer):
        return
    started = time.perf_counter()
    check(model, optimizer)
    claim()
    checkpointer = session.checkpointer(margs.save)
    chunks, saved = _saved(margs, model, optimizer)
    state = checkpointer.model_state
    expected = together(lambda: expect(state, chunks, saved))
    geometry = state.geometry(chunks)
    pieces = _of_the_model(state, geometry, expected.pieces)
    _add_up(tally(pieces, state.stands_for(chunks)))
    needs = _fitting(checkpointer, expected)
    _probe(margs, checkpointer)
    _announce(margs, checkpointer, expected, needs, started)
    checkpointer.prepare(expected)
    checkpointer.start_run()
    state.copied_keys = _copied(geometry.copied_keys)
    _note_checked(margs, model, optimizer)


def watch() -> None:
    """See to it that `begin` comes before the first training step, also without a load."""
    training = stock.loaded("training")
    if training is None or stock.is_replaced("training", "train_step"):
        return
    stock.replace("training", "train_step", train_step)
    if hasattr(training, "save_checkpoint_and_time"):
        stock.replace("training", "save_checkpoint_and_time", save_checkpoint_and_time)


def watch_from_import() -> None:
    """See to `watch` where nothing of ours is called before a step, unless there is a load.

    So it is where only imports were swapped, in releases without `async_utils`. Their `training`
    imports us while it is being imported itself, and has by then what it calls before a step.
    """
    training = stock.loaded("training")
    if training is None or hasattr(training, "train_step") or not hasattr(training, _BEFORE_STEP):
        return
    if not exists(f"{training.__package__}.async_utils"):
        stock.replace("training", _BEFORE_STEP, _watch_and_call)


def _watch_and_call(*args: Any, **kwargs: Any) -> Any:
    watch()
    return stock.original("training", _BEFORE_STEP)(*args, **kwargs)


def save_checkpoint_and_time(*args: Any, **kwargs: Any) -> Any:
    """Call Megatron's own function, and measure how long the training loop waits for it."""
    with session.loop_timer.measure():
        return stock.original("training", "save_checkpoint_and_time")(*args, **kwargs)


def train_step(*args: Any, **kwargs: Any) -> Any:
    """Do what Megatron's own `train_step` does; before the first, `begin`; after it, rehearse.

    In releases whose loop does not ask for the outcomes of saves, ask for them before every step.

    Raises:
        UnsupportedError: as `begin`; or the first step made state that cannot be saved.
        SaveFailedError: as `maybe_finalize_async_save`, in releases that do not have it.
    """
    step = stock.original("training", "train_step")
    margs = stock.checkpointing().get_args()
    if not _asks_every_iteration():
        session.finalize(blocking=False)
    if not margs.save or session.has_stepped:
        return step(*args, **kwargs)
    named = stock.bind(step, args, kwargs)
    begin(named["model"], named["optimizer"])
    if captures_graphs(margs):
        # Calls of other threads can break a capture. The copy thread's cannot; page-locking and
        # the making of streams end before the first capture.
        session.checkpointer(margs.save).link.wait_for_device_work()
    result = step(*args, **kwargs)
    chunks, saved = _saved(margs, named["model"], named["optimizer"])
    # State of a kind that cannot be saved shows now: not in the first save, hours later.
    if saved is None or has_states(saved):
        checkpointer = session.checkpointer(margs.save)
        session.has_stepped = checkpointer.rehearse(chunks, saved, margs)
    return result


@functools.cache
def _asks_every_iteration() -> bool:
    """Return whether Megatron's loop calls `maybe_finalize_async_save` in every iteration."""
    return has_async_utils()


def _saved(margs: Any, model: list[Any], optimizer: Any) -> tuple[list[Any], Any]:
    """Return the unwrapped chunks, and the optimizer unless it is not to be saved."""
    return stock.unwrap(model), None if getattr(margs, "no_save_optim", False) else optimizer


def _is_checked(margs: Any, model: list[Any], optimizer: Any, *, alone: bool = False) -> bool:
    session.checkpointer(margs.save)
    return session.is_checked(margs.save, *_saved(margs, model, optimizer), alone=alone)


def _note_checked(margs: Any, model: list[Any], optimizer: Any, *, alone: bool = False) -> None:
    session.note_checked(margs.save, *_saved(margs, model, optimizer), alone=alone)


def _of_the_model(state: ModelState, geometry: ModelGeometry, pieces: list[Piece]) -> list[Piece]:
    """Return weights and buffers, masters that are saved in place of weights among the weights.

    Layers that share a key may be saved in either way: only 16-bit weights are made of masters.
    """
    weights = {(piece.key, piece.offset, piece.shape) for piece in pieces if piece.kind == WEIGHT}
    return [
        msgspec.structs.replace(piece, kind=WEIGHT) if piece.kind == MASTER else piece
        for piece in pieces
        if piece.kind != MASTER
        or (
            state.derives_key(geometry, piece.key)
            and (piece.key, piece.offset, piece.shape) not in weights
        )
    ]


def _check_own(margs: Any, model: list[Any], optimizer: Any) -> frozenset[str]:
    """Check this rank; return the keys under which it has FP8 or FP4 weights."""
    state = session.checkpointer(margs.save).model_state
    chunks, saved = _saved(margs, model, optimizer)
    self_check.check(margs, state, chunks, saved)
    ensure(margs.save)
    # Where no agent can be, no save would ever be committed.
    agent_directory(margs.save, session.config.runtime_dir)
    return state.geometry(chunks).quantized_keys


def _node(margs: Any) -> tuple[str, str]:
    """Return what tells nodes apart: the host, and where its agent is."""
    return platform.node(), str(agent_directory(margs.save, session.config.runtime_dir))


def _check_derived(state: ModelState, chunks: list[Any], saved: Any) -> None:
    """Check plain weights that share keys with FP8 or FP4 weights of any rank."""
    if lines := self_check.of_derived(state, chunks, saved):
        raise self_check.refusal(lines)


def _add_up(mine: dict[str, Tally]) -> None:
    """Raise unless all ranks together hold every element once. Collective.

    One number per rank says whether they do; only if not, all of them are compared.
    """
    products = (
        xxhash.xxh3_64_intdigest(name.encode()) * (it.held - it.wanted) for name, it in mine.items()
    )
    if reduce_int(sum(products) % _PRIME, "sum") % _PRIME == 0:
        return
    total: dict[str, Tally] = {}
    for of_rank in gather_objects(mine):
        for name, it in of_rank.items():
            total[name] = total.get(name, Tally(0, 0)).plus(it)
    raise self_check.refusal(
        [
            f"{name}: all ranks together would save {it.held} of {it.wanted} elements"
            for name, it in sorted(total.items())
            if it.held != it.wanted
        ]
    )


def _copied(mine: frozenset[str]) -> frozenset[str]:
    """Return the keys of which any rank that holds a part of the same model replica has a copy.

    Collective.
    """
    return mine.union(*gather_objects(mine, parallel.model_parallel_group()))


def _fitting(checkpointer: Checkpointer, expected: Expected) -> list[Need]:
    """Return the need of each rank, in rank order, if all nodes have the memory. Collective.

    Ranks of an earlier run that this one does not have may still hold some: the agents, which learn
    of the run here, get time to free it.

    Raises:
        StorageError: on all ranks alike, as `node_memory.check`.
    """
    run_id, slots = checkpointer.agree(), checkpointer.config.slots
    needs = _needs(checkpointer, expected)
    ranks = node_memory.neighbours(needs, checkpointer.rank)
    checkpointer.link.begin_run(BeginRun(run_id, ranks))
    try:
        node_memory.check(needs, slots)
    except StorageError:
        needs = _needs(checkpointer, expected, checkpointer.link.holder(_RELEASE_S))
        node_memory.check(needs, slots)
    return needs


def _needs(checkpointer: Checkpointer, expected: Expected, holder: str = "") -> list[Need]:
    """Return the need of each rank, in rank order. Collective."""
    config = checkpointer.config
    with contextlib.suppress(FlashCkptError):  # the first save will meet the same trouble
        checkpointer.link.reclaim()
    agent = str(agent_directory(checkpointer.root, config.runtime_dir))
    slab = slab_nbytes(config.slots, expected.nbytes, expected.plan_nbytes)
    held = int(slab * config.held_share)
    is_there = checkpointer.link.has_slab
    return node_memory.gather_needs(
        slab,
        held,
        is_there=is_there,
        agent=agent,
        holder=holder,
        compared_nbytes=expected.compared_nbytes,
    )


def _probe(margs: Any, checkpointer: Checkpointer) -> None:
    """Raise on all ranks if the save directory cannot hold checkpoints. Collective."""
    wait_s = checkpointer.config.probe_wait_s
    if getattr(margs, "skip_train", False):  # such a job may only read there
        return
    is_first_of_node = int(os.environ.get("LOCAL_RANK", "0")) == 0
    storage = open_storage(checkpointer.root)
    probe.check(storage, checkpointer.rank, is_first_of_node=is_first_of_node, wait_s=wait_s)


def _announce(
    margs: Any, checkpointer: Checkpointer, expected: Expected, needs: list[Need], started: float
) -> None:
    """Say what will happen, on rank 0."""
    config = checkpointer.config
    node = node_memory.around(needs, checkpointer.rank)
    largest = max(need.slab_nbytes for need in needs)
    needed = sum(needs[rank].nbytes for rank in node.ranks)
    took = time.perf_counter() - started
    every = getattr(margs, "save_interval", None)
    lines = [
        f"{megatron_flashckpt.__version__}, {stock.door()}; megatron-core "
        f"{package_info.__version__}, torch {torch.__version__}",
        f"saves to {checkpointer.root}{f' every {every} iterations' if every else ''}"
        f"{_in_between(margs)}; {_kept(config.retention, margs)}; redundancy: {config.redundancy}",
        f"host memory: {config.slots} slots of {shown(expected.nbytes)} on rank 0, at most "
        f"{shown(largest)} per rank; {shown(needed)} on this node ({len(node.ranks)} ranks) "
        f"of {shown(node.left_nbytes)} available",
        f"self-check of {len(expected.pieces)} pieces on rank 0 passed in {1000 * took:.0f} ms; "
        + (
            "memory of the run before is used again"
            if checkpointer.link.has_slab
            else "agent and memory are made ready in the background, so that the first save costs "
            "no more than later ones"
        ),
    ]
    if config.slots == 1:
        lines.append(
            "slots: 1: a save begins when the one before is committed or has failed"
            f"{', or is skipped' if config.busy == 'skip' else ''}; a crash during its copies into "
            "host memory resumes from storage"
        )
    if (flag := changes_beside_steps(margs)) is not None and config.staging != "blocking":
        lines.append(
            f"each save copies everything before it returns, as with 'staging: blocking', because "
            f"{flag} changes tensors outside of the optimizer's step"
        )
    for line in lines:
        stock.checkpointing().print_rank_0(f"  flashckpt: {line}")


def _in_between(margs: Any) -> str:
    interval = getattr(margs, "non_persistent_save_interval", None)
    return f", to host memory only every {interval}" if interval else ""


def _kept(rules: Retention, margs: Any) -> str:
    given = {
        "latest": rules.latest,
        "every": rules.every,
        "best": rules.best and f"{rules.best.keep} by {rules.best.metric}",
        "hours": rules.max_age_hours,
        "--save-retain-interval": getattr(margs, "save_retain_interval", None),
    }
    kept = [f"{name} {value}" for name, value in given.items() if value is not None]
    return f"kept: {', '.join(kept) or 'all'}"
