"""Check that all ranks have equal values of the settings that decide on their collective calls.

Ranks of different nodes may read different files and variables. Without this check, the first rank
that takes another branch would leave the others waiting until they time out. Agents with different
parity groups would refuse each other's copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from megatron_flashckpt.collectives import gather_objects, reduce_largest
from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import ConfigError

_NAMES = (
    *("busy", "damaged", "local_tier", "memory_interval", "redundancy", "redundancy_group"),
    *("restore_from_memory", "share_reads", "slots", "wait"),
)


def numbers(config: Config) -> list[int]:
    """Return this rank's numbers, whose largest values over all ranks `refuse_unequal` takes."""
    # Two bits less, so that the negative number also fits into 64 bits.
    digest = xxhash.xxh3_64_intdigest(repr(_values(config)).encode()) >> 2
    return [digest, -digest]


def refuse_unequal(config: Config, largest: Sequence[int]) -> None:
    """Raise on all ranks if a setting differs between ranks. Collective only then.

    Args:
        largest: the elementwise maximum of `numbers` over all ranks.

    Raises:
        ConfigError: names each such setting, with its values.
    """
    if largest[0] == -largest[1]:
        return
    of_ranks = gather_objects(_values(config))
    differing = []
    for name, values in zip(_NAMES, zip(*of_ranks, strict=True), strict=True):
        first_rank: dict[object, int] = {}
        for rank, value in enumerate(values):
            first_rank.setdefault(value, rank)
        if len(first_rank) > 1:
            shown = ", ".join(f"{value} on rank {rank}" for value, rank in first_rank.items())
            differing.append(f"'{name}' is {shown}")
    raise ConfigError(
        f"settings differ between ranks: {'; '.join(differing)}; give all nodes the same settings "
        "file and the same FLASHCKPT_* variables"
    )


def check(config: Config) -> None:
    """Raise on all ranks if a setting differs between ranks. Collective.

    Raises:
        ConfigError: see `refuse_unequal`.
    """
    refuse_unequal(config, reduce_largest(numbers(config)))


def _values(config: Config) -> list[object]:
    return [getattr(config, name) for name in _NAMES]
