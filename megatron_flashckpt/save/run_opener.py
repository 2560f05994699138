"""Opens the run under which the ranks of a job save to one directory."""

from __future__ import annotations

import logging
import uuid

from megatron_flashckpt.agent import runs
from megatron_flashckpt.agent.alive import Admission
from megatron_flashckpt.catalog import history
from megatron_flashckpt.catalog.history import PastStart
from megatron_flashckpt.catalog.lineage import Facts, Save
from megatron_flashckpt.collectives import reduce_int, run_on_rank_0
from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import AgentError, AgentRefusedError
from megatron_flashckpt.file_format.file_names import run_number
from megatron_flashckpt.file_format.run_object import Ancestors, RunObject, Source
from megatron_flashckpt.save.node_link import NodeLink
from megatron_flashckpt.save.run import Run, opened_once
from megatron_flashckpt.storage.opening import open_store
from megatron_flashckpt.storage.retrying_store import RetryingStore

logger = logging.getLogger(__name__)


class RunOpener:
    """The run of this process, and the way to it: wait for other runs, agree, open.

    Every rank calls every method. All but `ensure_alone` are collective.
    """

    def __init__(
        self, root: str, rank: int, world_size: int, link: NodeLink, config: Config
    ) -> None:
        """Look at nothing yet.

        Args:
            root: absolute path of the save directory.
        """
        self.run = Run()
        self._root = root
        self._rank = rank
        self._world_size = world_size
        self._link = link
        self._config = config
        # A short outage of storage must not end a job that has just started.
        self._store = RetryingStore(open_store(root))
        self._admission = Admission(
            self._store, config.other_writer, config.other_writer_wait_s, link.client
        )
        self.has_waited = False
        """True once `await_end` was called."""
        #: Id of this start of the job; None until the ranks have agreed.
        self._start_id: str | None = None
        #: The run that the agent of this rank was told.
        self._told: RunObject | None = None

    def await_end(self) -> None:
        """Wait until no other run saves to the directory; later calls do nothing.

        Raises:
            OtherWriterError: another run trains there; nothing was changed.
        """
        if not self.has_waited:
            self._start_id = run_on_rank_0(self._await_end)
            self.has_waited = True

    def _await_end(self) -> str:
        if self.run.name is not None:
            self._admission.allow(self.run.name)
        self._admission.await_end()
        return _new_id()

    def agree(self) -> str:
        """Return an id of this start of the job, chosen by rank 0 in the first call."""
        if self._start_id is None:
            self._start_id = run_on_rank_0(_new_id)
        return self._start_id

    def open(
        self,
        save: Save | None,
        ancestors: Ancestors,
        source: Source,
        facts: Facts | None = None,
    ) -> None:
        """Open a run, under which this process saves from now on.

        Called when a load is agreed, and before the first save of a job that loads nothing. A
        second load that training continues from opens another run.

        Args:
            save: the checkpoint that training continues from; None: from scratch.
            ancestors: those of the run that has made `save`.
            facts: what rank 0 has seen when it chose `save`; None: the job loads nothing.

        Raises:
            OtherWriterError: another run has begun to train there meanwhile; nothing was changed.
            StorageError: the directory cannot be written.
        """
        held = reduce_int(self._newest_known(), "max")
        self._begin(run_on_rank_0(lambda: self._opened(save, ancestors, source, held, facts)))

    def ensure(self) -> None:
        """Open a run from scratch, unless a load has opened one."""
        if self.run.object is None:
            self.open(None, (), "scratch")
        self._tell_agent()

    def ensure_alone(self) -> None:
        """Open a run as `ensure` does, but without a collective: the ranks may not have met."""
        if self.run.object is None:
            # First, because local rank 0, which starts the agent, may wait below for this rank.
            held = self._newest_known()
            self._begin(
                opened_once(
                    self._root,
                    lambda: self._opened(None, (), "scratch", held),
                    self._config.other_writer_wait_s,
                )
            )
        self._tell_agent()

    def _newest_known(self) -> int:
        """Return the highest number of a run that this process or its agent knows; 0: none.

        The agent reports its number when this process connects.
        """
        own = 0 if self.run.name is None else run_number(self.run.name)
        try:
            facts = self._link.client().facts
        except AgentError:  # a save will connect to an agent, or report that there is none
            return own
        return max(own, facts.run_number)

    def _opened(
        self,
        save: Save | None,
        ancestors: Ancestors,
        source: Source,
        held: int,
        facts: Facts | None = None,
    ) -> RunObject:
        """Open a run on this rank alone, and grant the tracker's wish."""
        run = runs.new_run(save, ancestors, source, self._world_size)
        try:
            agent_pid = self._link.serving_agent()
        except AgentRefusedError as error:
            # The run of the later start must stay the newest one.
            logger.error("%s: this process opens no run: %s", self._root, error)
            return run
        if self.run.name is not None:
            self._admission.allow(self.run.name)
        # Only the agent of rank 0 renews the sign of life.
        agent_pid = agent_pid if self._rank == 0 else 0
        opened = runs.open_run(self._admission, run, agent_pid=agent_pid, held=held)
        runs.grant_wish(self._store, opened, facts)
        if self._config.history:
            history.shorten(self._store, self._config.history)
            history.append(self._store, PastStart.of(opened))
        return opened

    def _begin(self, opened: RunObject) -> None:
        self.run.begin(opened)
        self._tell_agent()

    def _tell_agent(self) -> None:
        """Tell the agent of this rank which run it saves for, if this process has not."""
        if self._told is not self.run.object and self.run.object is not None:
            self._told = self.run.object
            self._link.open_run(self.run.object)


def _new_id() -> str:
    return uuid.uuid4().hex[:8]
