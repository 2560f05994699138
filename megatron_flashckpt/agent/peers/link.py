"""Sends staged slots to the nodes that hold them, in the background, the newest first."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator

from megatron_flashckpt.agent import slot_bytes
from megatron_flashckpt.agent.peers import messages as m
from megatron_flashckpt.agent.peers.topology import Part
from megatron_flashckpt.agent.peers.transport import Connection, PeerError
from megatron_flashckpt.agent.slot_bytes import SlotDescriptor
from megatron_flashckpt.failpoints import hit
from megatron_flashckpt.memory.slab import Slab

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class SendRequest:
    """One rank's part for one holder."""

    slab: Slab
    index: int
    descriptor: SlotDescriptor
    part: Part


class _OvertakenError(Exception):
    """The slot was overwritten with a newer checkpoint before all bytes were sent."""


class _DeclinedError(Exception):
    """The holder declines the part; another attempt would not help."""


_TAKEN = "a newer save took its slot before all bytes were sent; save less often, or raise 'slots'"
#: Seconds until a silent holder is tried again: the first pause, and the longest.
_PAUSE_S = (1.0, 30.0)


class Link:
    """Sends to one holder, in a thread. Keeps one waiting request per rank: the newest.

    A holder that is gone, slow or hung causes one warning, and blocks only this thread.
    """

    def __init__(self, place: str, connect: Callable[[], Connection]) -> None:
        """Start the thread.

        Args:
            place: the holder, for messages.
        """
        self._place = place
        self._connect = connect
        self._connection: Connection | None = None
        self._waiting: dict[int, SendRequest] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._pause_s = _PAUSE_S[0]
        self._warned: set[type[Exception]] = set()
        self._thread = threading.Thread(target=self._run, name=f"link-{place}", daemon=True)
        self._thread.start()

    def put(self, request: SendRequest) -> None:
        """Send `request` next; it replaces an unsent older one of the same rank."""
        with self._changed:
            self._waiting[request.descriptor.rank] = request
            self._changed.notify()

    def close(self) -> None:
        """Stop soon; waiting requests are not sent."""
        with self._changed:
            self._closing = True
            if self._connection is not None:
                self._connection.give_up()
            self._changed.notify()

    def join(self) -> None:
        """Return when the thread has stopped."""
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closing:
                    self._changed.wait()
                if self._closing:
                    break
                request = self._waiting.pop(next(iter(self._waiting)))
            descriptor = request.descriptor
            try:
                self._send(request)
            except (_OvertakenError, _DeclinedError) as error:
                self._hang_up()
                self._warn(descriptor, error)
            except PeerError as error:
                self._hang_up()
                self._warn(descriptor, error)
                self._put_back(request)
            except Exception:  # otherwise the thread would end, and no later save be sent
                self._hang_up()
                logger.exception(
                    "iteration %d was not sent to %s", descriptor.iteration, self._place
                )
            else:
                self._warned.clear()
                self._pause_s = _PAUSE_S[0]
                subject = (descriptor.rank, descriptor.iteration, self._place)
                logger.info("rank %d: iteration %d is held by %s", *subject)
        self._hang_up()

    def _warn(self, descriptor: SlotDescriptor, error: Exception) -> None:
        # One warning until a send succeeds, because the error concerns every save.
        level = logging.DEBUG if type(error) in self._warned else logging.WARNING
        self._warned.add(type(error))
        subject = (descriptor.rank, descriptor.iteration, self._place, error)
        logger.log(
            level,
            "rank %d: iteration %d is not held by %s: %s; training and saving continue, but if "
            "this node is lost meanwhile, the job resumes from storage",
            *subject,
        )

    def _put_back(self, request: SendRequest) -> None:
        """Queue `request` again, unless a newer one waits, and pause."""
        with self._changed:
            self._waiting.setdefault(request.descriptor.rank, request)
            if not self._closing:
                self._changed.wait(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _PAUSE_S[1])

    def _hang_up(self) -> None:
        with self._changed:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _send(self, request: SendRequest) -> None:
        with self._changed:
            if self._connection is None:
                self._connection = self._connect()
        descriptor, part = request.descriptor, request.part
        if not slot_bytes.holds(request.slab, request.index, descriptor.save_id):
            raise _OvertakenError(_TAKEN)
        reply, _ = self._connection.ask(m.Begin(part, descriptor))
        if isinstance(reply, m.Taken) and reply.already:
            return
        _check(reply)
        hit("send.begun")
        for reply, _ in self._connection.pipeline(self._chunks(request)):
            _check(reply)
        _check(
            self._connection.ask(m.End(part.parity_group, descriptor.rank, descriptor.save_id))[0]
        )
        hit("send.ended")

    def _chunks(self, request: SendRequest) -> Iterator[tuple[m.Request, bytes]]:
        descriptor, part = request.descriptor, request.part
        begin, end = part.bounds(descriptor.nbytes)
        for start, nbytes in m.steps(begin, end):
            if self._closing:
                raise _OvertakenError("the agent is leaving, or its peers changed")
            data = slot_bytes.read(request.slab, request.index, descriptor, start, nbytes)
            if data is None:
                raise _OvertakenError(_TAKEN)
            hit("send.chunk")
            yield (
                m.Chunk(part.parity_group, descriptor.rank, descriptor.save_id, start - begin),
                data,
            )


def _check(reply: m.Reply) -> None:
    if isinstance(reply, m.Declined):
        raise _DeclinedError(f"the holder declined: {reply.reason}")
