"""Variants of a save in section `megatron`, each without one possible cause of lost training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from megatron_flashckpt.agent import process
from megatron_flashckpt.memory import cuda
from megatron_flashckpt.save import stager
from megatron_flashckpt.save.node_link import NodeLink
from tools.gpu_check.undigested_agent import switch


def prepare() -> None:
    """Make this process start agents whose digests `_undigested` can switch off."""
    command = process.command

    def wrapped(*given: Any) -> list[str]:
        interpreter, flag, *rest = command(*given)
        return [interpreter, flag, "tools.gpu_check.undigested_agent", *rest]

    process.command = wrapped


@contextlib.contextmanager
def _undigested(_: NodeLink) -> Iterator[None]:
    switch().touch()
    yield
    switch().unlink()


@contextlib.contextmanager
def _not_locked(link: NodeLink) -> Iterator[None]:
    link.stager.wait()
    if (pinned := link.stager._pinned) is not None:
        pinned.unpin()
    link.stager._pinned = None
    yield
    link.stager.wait()
    link._pin(hurry=True)
    link.stager.wait_pinned()


#: Contexts that change the saves of a trainer, by the name of the variant.
VARIANTS: dict[str, Callable[[NodeLink], contextlib.AbstractContextManager[object]]] = {
    "no digests by the agent": _undigested,
    "cache returned as Megatron does": lambda _: mock.patch.object(
        cuda, "cache_kept", contextlib.nullcontext
    ),
    "not page-locked": _not_locked,
    "no copies": lambda _: mock.patch.object(stager, "runs", return_value=()),
}
