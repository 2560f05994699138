"""Whether this Megatron and this job are what the shims expect; if not, one error says all of it.

It runs once, before the first training step. What it does not find would be missing from every
checkpoint without a word.
"""

from __future__ import annotations

from typing import Any

from megatron.core import package_info

import megatron_flashckpt
from megatron_flashckpt.errors import FlashCkptError, UnsupportedError
from megatron_flashckpt.megatron_lm import features, quantized
from megatron_flashckpt.megatron_lm.accounting import unaccounted, underivable
from megatron_flashckpt.megatron_lm.model_state import ModelState


def check(args: Any, state: ModelState, chunks: list[Any], optimizer: Any) -> None:
    """Raise unless all of this rank's state can be saved. No communication, and no copies.

    Args:
        state: keeps the geometry that is found here for the saves to come.
        chunks: unwrapped.
        optimizer: None: weights only.

    Raises:
        UnsupportedError: names everything that differs.
    """
    found = [*features.missing(args), *quantized.unsupported(args, chunks)]
    if not found:  # what is looked up next would fail for the same reason
        found = _of_model(state, chunks) + unaccounted(chunks, optimizer)
    if not found and state.derives and optimizer is not None:
        found = underivable(chunks, optimizer)
    if found:
        raise refusal(found)


def refusal(found: list[str]) -> UnsupportedError:
    """Return the error that names all that was `found`."""
    listed = "\n  ".join(found)
    return UnsupportedError(
        f"megatron_flashckpt {megatron_flashckpt.__version__} would not save all of this job under "
        f"megatron-core {package_info.__version__}:\n  {listed}\n"
        "Nothing was saved or changed. Install a release of megatron_flashckpt that knows this "
        "Megatron-LM, or start with Megatron's own checkpointing (without the launcher, the "
        "patch or the swapped imports)"
    )


def _of_model(state: ModelState, chunks: list[Any]) -> list[str]:
    try:
        state.owned(state.geometry(chunks), chunks, None)
    except FlashCkptError as error:
        return [str(error)]
    return []
