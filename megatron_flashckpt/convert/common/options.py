"""What a user can choose about a conversion."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Settings that every destination takes, whether they mean something to it or not."""

    overwrite: bool = False
    """Replace the result of an earlier conversion, if one is where the result goes."""
    weights_only: bool = False
    """Leave out optimizer state, random states and scheduler."""
    accept_damage: bool = False
    """Convert optimizer state that does not fit the weights."""
    shard_nbytes: int = 4 * 2**30
    """Largest file; a box that is larger gets a file of its own."""
    memory_nbytes: int = 2**30
    """Verified chunks of the source that are kept, because a box often lies in several files."""
