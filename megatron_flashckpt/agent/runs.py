"""Opens a run: takes its number, and records from where training continues. Used by rank 0.

A run is opened when its load is agreed, or before the first save of a job that loads nothing. Two
starts at one moment race for one name, so one of them sees that it was not first.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
import time
from collections.abc import Iterator

import msgspec

from megatron_flashckpt.agent import alive
from megatron_flashckpt.agent.alive import Admission
from megatron_flashckpt.agent.incarnations import process_with
from megatron_flashckpt.catalog.directory import put_tracked, run_numbers, tracked
from megatron_flashckpt.catalog.lineage import Facts, Save, descent, granted
from megatron_flashckpt.errors import (
    AlreadyExistsError,
    CorruptCheckpointError,
    StorageError,
    is_damage,
)
from megatron_flashckpt.failpoints import hit
from megatron_flashckpt.file_format.file_names import (
    TRACKER,
    parse_iteration_dir,
    parse_save,
    run_file,
    run_name,
    run_number,
    save_of,
)
from megatron_flashckpt.file_format.run_object import (
    Ancestors,
    RunObject,
    Source,
    decode_run,
    encode_run,
)
from megatron_flashckpt.storage.parallel import for_all
from megatron_flashckpt.storage.store import Store

logger = logging.getLogger(__name__)

_NBYTES = 2**20


def new_run(
    save: Save | None,
    ancestors: Ancestors,
    source: Source,
    world_size: int,
) -> RunObject:
    """Return a run that continues `save`; `open_run` completes its name.

    Args:
        save: None: the run begins from scratch.
        ancestors: those of the run that has made `save`.
    """
    return RunObject(
        name=run_name(0, _nonce()),
        ancestors=() if save is None else descent(save, ancestors),
        save_id=None if save is None else save.save_id or None,
        iteration=0 if save is None else save.iteration,
        source=source,
        opened_at=time.time(),
        host=platform.node(),
        world_size=world_size,
    )


def _nonce() -> str:
    return secrets.token_hex(2)


def open_run(
    admission: Admission, run: RunObject, *, agent_pid: int = 0, held: int = 0
) -> RunObject:
    """Create the object of `run` under a number of its own; return it with its name.

    The number is higher than that of every run that has left a name in the directory, of every save
    in memory, and of every earlier run of this job's processes. The number of requests does not
    depend on the number of earlier runs.

    Args:
        agent_pid: agent of rank 0, which will renew the sign of life; 0: there is none.
        held: the highest number of a run that this job's processes have opened, or whose saves the
            agents hold.

    Raises:
        OtherWriterError: another run trains there; nothing was left behind.
        StorageError: the directory cannot be written.
    """
    store = admission.store
    ancestry = (run_number(ancestor.run) for ancestor in run.ancestors)
    lowest = 1 + max([held, *ancestry, *_numbers_of_saves(store)])
    while True:
        number = max([lowest, *(other + 1 for other in run_numbers(store))])
        # A run that has taken a number since the last look is seen here: its sign of life is older.
        admission.await_end()
        opened = msgspec.structs.replace(run, name=run_name(number, run.name.rpartition("-")[2]))
        if _create(store, opened, agent_pid):
            break
        lowest = number + 1
    admission.allow(opened.name)
    return opened


def _create(store: Store, run: RunObject, agent_pid: int) -> bool:
    """Create the object of a run; return False if another run has taken the number.

    The sign of life comes first, so that who finds the object finds a live run.
    """
    name = run_file(run_number(run.name))
    is_ours = False
    try:
        if agent_pid:
            trainer = process_with(os.getpid())
            sign = alive.sign_of_life(run.name, "training", agent_pid, trainer=trainer)
            alive.put(store, sign)
        hit("run.announced")
        try:
            store.create(name, encode_run(run))
        except StorageError as error:
            # The answer to an earlier attempt may be lost: what the name says decides.
            is_ours = _read(store, name) == run
            if not is_ours and not isinstance(error, AlreadyExistsError):
                raise
        else:
            is_ours = True
        if is_ours:
            store.make_durable(name)
            hit("run.created")
        return is_ours
    finally:
        if agent_pid and not is_ours:
            alive.forget(store, run.name)


def _read(store: Store, name: str) -> RunObject | None:
    """Return the run in an object; None if there is none, or after a warning on a damaged one."""
    try:
        return decode_run(store.get(name, 0, _NBYTES), f"{store.place}/{name}")
    except FileNotFoundError:
        return None
    except (CorruptCheckpointError, StorageError) as error:
        if not is_damage(error):
            raise
        logger.warning("%s; this run takes the next number", error)
        return None


def _numbers_of_saves(store: Store) -> Iterator[int]:
    """Yield the numbers of the runs that have left a file in an iteration directory.

    Their objects are gone if a person has removed `flashckpt/` or copied the checkpoints.
    """
    entries = store.list("", sizes=False)
    directories = [
        entry.name
        for entry in entries
        if entry.kind == "directory" and parse_iteration_dir(entry.name) is not None
    ]
    for names in for_all(lambda directory: store.list(directory, sizes=False), directories):
        for save_id in {save_of(entry.name) for entry in names}:
            if save_id is not None and (parsed := parse_save(save_id)) is not None:
                yield parsed.number


def grant_wish(store: Store, run: RunObject, facts: Facts | None) -> None:
    """Write down that a run was granted what the tracker names: it is no wish any more.

    Args:
        facts: what the load has seen; None: the job has loaded nothing. Such a job leaves the
            tracker as it is, but is granted that a person has removed it.

    Raises:
        StorageError: `tracker.json` cannot be written.
    """
    if facts is None and store.stat(TRACKER) is not None:
        return
    if facts is None:
        facts = Facts(tracker=None, tracked=tracked(store), runs={}, stored=())
    if (contents := granted(facts, run.name)) is not None:
        put_tracked(store, contents)


def why_overtaken(store: Store, later: RunObject) -> str:
    """Return why the saves of a run do not count any more, with place and remedy."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(later.opened_at))
    cure = "end one of the two jobs"
    if _has_ended(store, later.name):
        cure = "that run has ended since: start this job again, which continues its checkpoint"
    return (
        f"{store.place}: run {later.name} on {later.host or 'another host'} ({when}) has taken "
        f"over this save directory, so the saves of this run do not count any more; {cure}, or "
        "save elsewhere"
    )


def _has_ended(store: Store, run: str) -> bool:
    """Return whether a run has removed its sign of life, or its agent was killed on this machine.

    An agent that was killed elsewhere leaves a sign that does not tell.
    """
    try:
        sign = alive.read(store, run)
    except StorageError:  # unknown, and only a text depends on it
        return False
    return sign is None or sign.is_of_dead_process
