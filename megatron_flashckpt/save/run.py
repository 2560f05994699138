"""The run of this process in one save directory, and the names of its saves."""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from megatron_flashckpt.errors import FlashCkptError
from megatron_flashckpt.file_format.file_names import first_sequence, save_name
from megatron_flashckpt.file_format.run_object import Ancestors, RunObject, decode_run, encode_run
from megatron_flashckpt.save.background_work import answer_within

_T = TypeVar("_T")

#: Longest wait of a rank until the first one has opened the run, in addition to what that one may
#: wait for another run to end.
_OPENED_S = 300.0
#: Additional seconds for one reply: PyTorch's client waits without end for a store that hangs.
_ANSWER_S = 60.0
#: First byte of an error in place of a run.
_REFUSED = "!"


class Run:
    """Names the saves of this process to one directory, over all its checkpointers."""

    def __init__(self) -> None:
        self.object: RunObject | None = None
        """Equal on all ranks; None until the run is opened."""
        #: Numbers of the last saves: those for storage are odd, those for host memory only even.
        self._last = [-1, 0]

    @property
    def name(self) -> str | None:
        return None if self.object is None else self.object.name

    @property
    def ancestors(self) -> Ancestors:
        """Ancestors of the open run, which every save repeats."""
        return () if self.object is None else self.object.ancestors

    def begin(self, opened: RunObject) -> None:
        """Count the saves anew, for the run that was just opened."""
        self.object, self._last = opened, [-1, 0]

    def new_save_id(self, iteration: int, *, memory_only: bool) -> str:
        """Return the name of the next save: equal on all ranks, and never used before.

        Numbers grow, and begin again from the iteration in each one. So a rank that has missed a
        save, or counts one more, names the saves of later iterations as the others do. Saves for
        host memory only have numbers of their own, so that they do not count for the others.

        The run is open.
        """
        assert self.object is not None
        number = max(self._last[memory_only] + 2, first_sequence(iteration) + memory_only)
        self._last[memory_only] = number
        return save_name(self.object.name, number)


def opened_once(root: str, open_run: Callable[[], RunObject], wait_s: float) -> RunObject:
    """Return the run that one rank opens for all, without a collective.

    For jobs that save to `root` before their ranks have met. The first rank that reaches the job's
    rendezvous store calls `open_run`; the others wait for its run.

    Args:
        wait_s: how long `open_run` may wait for another run to end.

    Raises:
        FlashCkptError: that rank could not open the run, or the store is gone or hangs.
    """
    if not dist.is_initialized():
        return open_run()
    store = dist.distributed_c10d._get_default_store()
    key = f"megatron_flashckpt/run/{root}"
    own = str(dist.get_rank())
    # The same rank gets the same reply again, also if it had not waited for the first one.
    first: bytes = _answer(root, 0.0, store.compare_set, f"{key}/opener", "", own)
    if first.decode() != own or _answer(root, 0.0, store.check, [key]):
        within_s = wait_s + _OPENED_S
        _answer(root, within_s, store.wait, [key], datetime.timedelta(seconds=within_s))
        encoded: bytes = _answer(root, 0.0, store.get, key)
        if encoded.startswith(_REFUSED.encode()):
            raise FlashCkptError(encoded[len(_REFUSED) :].decode())
        return decode_run(encoded, "the job's store")
    try:
        opened = open_run()
    except Exception as error:
        with contextlib.suppress(FlashCkptError):
            _answer(root, 0.0, store.set, key, f"{_REFUSED}{error}")
        raise
    _answer(root, 0.0, store.set, key, encode_run(opened).decode())
    return opened


def _answer(root: str, within_s: float, ask: Callable[..., _T], *request: object) -> _T:
    """Return what the job's store answers to `ask(*request)`.

    Args:
        within_s: how long the store itself may wait.

    Raises:
        FlashCkptError: the store failed, or did not answer in time.
    """
    answer = answer_within(within_s + _ANSWER_S, "flashckpt-store", lambda: ask(*request))
    try:
        return answer.result(0.0)
    except (RuntimeError, concurrent.futures.TimeoutError) as error:
        # An error of the store may end with a page of C++ frames.
        reason = f"fails ({str(error).partition(chr(10))[0]})" if answer.done() else "hangs"
        raise FlashCkptError(
            f"{root}: this rank does not learn under which run the job saves, because the job's "
            f"rendezvous store {reason}; load before training, also in a fresh start, so "
            "that no save needs that store, or keep its process (that of rank 0, or torchrun) "
            "until all ranks have saved"
        ) from error
