"""Connections of trainers to the agent: one thread per connection, from greeting to end."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time

import msgspec

from megatron_flashckpt.agent import frames
from megatron_flashckpt.agent import protocol as p
from megatron_flashckpt.agent.incarnations import RankProcess, ReplacedError, process_of
from megatron_flashckpt.agent.node import Node, Trainer
from megatron_flashckpt.agent.reception import GREETING_NBYTES, SilentConnections
from megatron_flashckpt.agent.request_handler import RequestHandler
from megatron_flashckpt.agent.saves import Saves
from megatron_flashckpt.errors import FlashCkptError

logger = logging.getLogger(__name__)


class TrainerConnections:
    """All connections of trainers. Safe to use from several threads."""

    def __init__(
        self,
        node: Node,
        saves: Saves,
        handler: RequestHandler,
        silent: SilentConnections,
    ) -> None:
        self._node = node
        self._saves = saves
        self._handler = handler
        self._silent = silent
        self.connections = 0
        self.last_seen = time.monotonic()
        self.parting = False
        """True since the agent began to end, until a trainer connects again."""

    def begin(self, connection: socket.socket) -> None:
        """Serve a new connection in a thread of its own."""
        with self._node.changed:
            self.connections += 1
        self._silent.add(connection)
        try:
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
        except (RuntimeError, MemoryError) as error:  # out of threads or memory
            self._silent.log_refused(str(error))
            self._end(None, connection)

    def _serve(self, connection: socket.socket) -> None:
        number: int | None = None
        try:
            if (uid := frames.peer(connection).uid) != os.getuid():
                self._silent.log_refused(f"user {uid} is another user")
                return
            process = process_of(connection)
            number = self._greet(connection, process)
            while number is not None:
                body, fd = frames.receive(connection)
                with frames.ReceivedDescriptor(fd) as descriptor:
                    request = p.decode_request(body)
                    try:
                        answer = self._handler.answer(number, request, descriptor, process)
                    except FlashCkptError as error:
                        answer = (p.Refused(str(error)),)
                frames.send(connection, *answer)
        except EOFError:
            pass
        except (OSError, msgspec.MsgspecError, FlashCkptError) as error:
            if number is None:
                self._silent.log_refused(f"no greeting ({error})")
            else:
                logger.warning("rank %d: connection ended (%s)", number, error)
        except Exception:  # a defect must end this connection only
            logger.exception("rank %s: connection ended", number)
        finally:
            self._end(number, connection)

    def _end(self, number: int | None, connection: socket.socket) -> None:
        self._silent.remove(connection)
        connection.close()
        with self._node.changed:
            self.connections -= 1
            self.last_seen = time.monotonic()
            rank = self._node.ranks.get(-1 if number is None else number)
            # If a successor of the rank has connected already, the slots belong to the successor.
            if number is not None and rank is not None and rank.connection is connection:
                rank.connection = None
                self._handler.release(number)
                self._handler.inherit(number)
                rank.forget_saves()
                if not rank.left:
                    self._saves.digester.digest(rank)
            self._node.changed.notify_all()

    def _greet(self, connection: socket.socket, process: RankProcess | None) -> int | None:
        body, fd = frames.receive(connection, GREETING_NBYTES)
        with frames.ReceivedDescriptor(fd):
            hello = p.decode_request(body)
        self._silent.remove(connection)
        connection.settimeout(None)
        if not isinstance(hello, p.Hello) or hello.protocol != p.PROTOCOL_VERSION:
            reason = f"this agent speaks protocol {p.PROTOCOL_VERSION}; end it (pid {os.getpid()})"
            frames.send(connection, p.Refused(reason))
            return None
        if (refusal := self._node.held.why_not(hello.directory)) is not None:
            frames.send(connection, p.Refused(refusal))
            return None
        with self._node.changed:
            rank = self._node.ranks.setdefault(hello.rank, Trainer())
            try:
                former = rank.incarnations.greet(process, left=rank.left)
            except ReplacedError as error:
                logger.warning(
                    "rank %d: refused process %d", hello.rank, frames.peer(connection).pid
                )
                answer: p.Reply = p.Refused(str(error))
            else:
                self._begin_incarnation(hello.rank, connection, former)
                former_pid = 0 if former is None else former.pid
                answer = p.Welcome(os.getpid(), former_pid, self._node.facts())
        frames.send(connection, answer)
        return hello.rank if isinstance(answer, p.Welcome) else None

    def _begin_incarnation(
        self, number: int, connection: socket.socket, former: RankProcess | None
    ) -> None:
        """Serve the rank on `connection` only. The caller holds the lock."""
        rank = self._node.ranks[number]
        if former is not None:
            logger.warning(
                "rank %d: process %d replaces process %d, which still runs",
                number,
                frames.peer(connection).pid,
                former.pid,
            )
            if rank.connection is not None:
                # Ends the wait of the connection's thread; the process is refused when it
                # reconnects.
                with contextlib.suppress(OSError):
                    rank.connection.shutdown(socket.SHUT_RDWR)
            if rank.slots is not None:
                rank.slots.note_former(former)
        rank.left, rank.run = False, ""
        rank.connection = connection
        self._node.traces.first_rank = min(self._node.ranks)
        self.parting = False
        self._handler.inherit(number)
        rank.forget_saves()
        self._handler.recoveries.begin_trainer(number)
        self._node.changed.notify_all()
