"""Send what was staged to the nodes that hold it, in the background, the newest first."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator

from megatron_flashckpt.agent.peers import messages as m
from megatron_flashckpt.agent.peers import slot_bytes
from megatron_flashckpt.agent.peers.messages import Label
from megatron_flashckpt.agent.peers.topology import Part
from megatron_flashckpt.agent.peers.transport import Connection, PeerError
from megatron_flashckpt.failpoints import reach
from megatron_flashckpt.memory.slab import Slab

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Parcel:
    """One rank's part for one holder."""

    slab: Slab
    index: int
    label: Label
    part: Part


class _OvertakenError(Exception):
    """The slot was needed for a newer checkpoint before all was sent."""


class _DeclinedError(Exception):
    """The holder does not take it; asking again would not help."""


_TAKEN = "a newer save took its slot before all was sent; save less often, or raise 'slots'"
#: Seconds until a holder that did not answer is tried again: at first, and at most.
_PAUSE_S = (1.0, 30.0)


class Link:
    """Sends to one holder, in a thread. Keeps at most one waiting parcel per rank: the newest.

    A holder that is gone, slow or hung costs one warning, and never more than this thread's time.
    """

    def __init__(self, place: str, connect: Callable[[], Connection]) -> None:
        """Args: `place`: of the holder, for messages."""
        self._place = place
        self._connect = connect
        self._connection: Connection | None = None
        self._waiting: dict[int, Parcel] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._pause_s = _PAUSE_S[0]
        self._warned: set[type[Exception]] = set()
        self._thread = threading.Thread(target=self._run, name=f"link-{place}", daemon=True)
        self._thread.start()

    def put(self, parcel: Parcel) -> None:
        """Send it next, instead of an older one of the same rank that has not left."""
        with self._changed:
            self._waiting[parcel.label.rank] = parcel
            self._changed.notify()

    def close(self) -> None:
        """Stop soon; what waits is not sent."""
        with self._changed:
            self._closing = True
            if self._connection is not None:
                self._connection.give_up()
            self._changed.notify()

    def join(self) -> None:
        """Return when it has stopped."""
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closing:
                    self._changed.wait()
                if self._closing:
                    break
                parcel = self._waiting.pop(next(iter(self._waiting)))
            label = parcel.label
            try:
                self._send(parcel)
            except (_OvertakenError, _DeclinedError) as error:
                self._hang_up()
                self._warn(label, error)
            except PeerError as error:
                self._hang_up()
                self._warn(label, error)
                self._put_back(parcel)
            except Exception:
                self._hang_up()
                logger.exception("iteration %d was not sent to %s", label.iteration, self._place)
            else:
                self._warned.clear()
                self._pause_s = _PAUSE_S[0]
                where = (label.rank, label.iteration, self._place)
                logger.info("rank %d: iteration %d is held by %s", *where)
        self._hang_up()

    def _warn(self, label: Label, error: Exception) -> None:
        # Once, until it works again: it concerns every save alike.
        level = logging.DEBUG if type(error) in self._warned else logging.WARNING
        self._warned.add(type(error))
        which = (label.rank, label.iteration, self._place, error)
        logger.log(
            level,
            "rank %d: iteration %d is not held by %s: %s; training and saving go on, but if this "
            "node is lost meanwhile the job goes on from storage",
            *which,
        )

    def _put_back(self, parcel: Parcel) -> None:
        """Try again later, unless there is something newer by then."""
        with self._changed:
            self._waiting.setdefault(parcel.label.rank, parcel)
            if not self._closing:
                self._changed.wait(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _PAUSE_S[1])

    def _hang_up(self) -> None:
        with self._changed:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _send(self, parcel: Parcel) -> None:
        with self._changed:
            if self._connection is None:
                self._connection = self._connect()
        label, part = parcel.label, parcel.part
        if not slot_bytes.holds(parcel.slab, parcel.index, label.save_id):
            raise _OvertakenError(_TAKEN)
        reply, _ = self._connection.ask(m.Begin(part, label))
        if isinstance(reply, m.Taken) and reply.already:
            return
        _check(reply)
        reach("send.begun")
        for reply, _ in self._connection.pipeline(self._chunks(parcel)):
            _check(reply)
        _check(self._connection.ask(m.End(part.lane, label.rank, label.save_id))[0])
        reach("send.ended")

    def _chunks(self, parcel: Parcel) -> Iterator[tuple[m.Request, bytes]]:
        label, part = parcel.label, parcel.part
        begin, end = part.bounds(label.nbytes)
        for start, nbytes in slot_bytes.steps(begin, end):
            if self._closing:
                raise _OvertakenError("the agent leaves, or its peers changed")
            data = slot_bytes.read(parcel.slab, parcel.index, label, start, nbytes)
            if data is None:
                raise _OvertakenError(_TAKEN)
            reach("send.chunk")
            yield m.Chunk(part.lane, label.rank, label.save_id, start - begin), data


def _check(reply: m.Reply) -> None:
    if isinstance(reply, m.Declined):
        raise _DeclinedError(f"it declined: {reply.reason}")
