"""Requests for spans of other ranks' slots, each sent to the rank that is asked and to no other."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch

from megatron_flashckpt.collectives import Group, device_of, together
from megatron_flashckpt.load.all_to_all import Span, send_and_receive


def ask(
    wishes: Mapping[int, Sequence[Span]], askers: Sequence[int], group: Group
) -> dict[int, list[Span]]:
    """Return what each of `askers` wants of this rank, in its order. Collective.

    Args:
        wishes: by peer, what this rank wants of it.
        askers: the ranks in whose wishes this one is.

    Raises:
        FlashCkptError: on all ranks, if one has no memory for the requests.
    """
    device = device_of(group)
    # All ranks join in this before the first message: it connects the group.
    counted, counts = together(
        lambda: (
            torch.tensor([len(spans) for spans in wishes.values()], dtype=torch.int64).to(device),
            torch.zeros(len(askers), dtype=torch.int64).to(device),
        ),
        group,
    )
    send_and_receive(
        _by_peer(counted, wishes, [1] * len(wishes)),
        _by_peer(counts, askers, [1] * len(askers)),
        group,
    )

    def made() -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        numbers = [number for spans in wishes.values() for span in spans for number in span]
        lengths = [2 * count for count in counts.cpu().tolist()]
        received = torch.zeros(sum(lengths), dtype=torch.int64)
        return torch.tensor(numbers, dtype=torch.int64).to(device), received.to(device), lengths

    sent, received, lengths = together(made, group)
    send_and_receive(
        _by_peer(sent, wishes, [2 * len(spans) for spans in wishes.values()]),
        _by_peer(received, askers, lengths),
        group,
    )
    numbers = iter(received.cpu().tolist())
    spans = zip(numbers, numbers, strict=True)
    return {
        peer: list(itertools.islice(spans, length // 2))
        for peer, length in zip(askers, lengths, strict=True)
    }


def _by_peer(
    numbers: torch.Tensor, peers: Iterable[int], lengths: list[int]
) -> dict[int, torch.Tensor]:
    """Return the part of `numbers` for each peer, one after the other."""
    return dict(zip(peers, torch.split(numbers, lengths), strict=True)) if lengths else {}
