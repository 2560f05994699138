"""Options of a conversion."""

from __future__ import annotations

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options for all destination formats; a format ignores those that do not apply to it."""

    overwrite: bool = False
    """Replace the result of an earlier conversion in the destination."""
    weights_only: bool = False
    """Leave out optimizer state, random states and scheduler."""
    accept_damage: bool = False
    """Convert optimizer state that does not match the weights."""
    shard_nbytes: int = 4 * 2**30
    """Size of the largest file; a larger box has a file of its own."""
    memory_nbytes: int = 2**30
    """Size of the cache of verified chunks of the source; several boxes often share a chunk."""
    hf_config: Path | None = None
    """Directory with the `config.json` and the tokenizer of a Hugging Face model."""
