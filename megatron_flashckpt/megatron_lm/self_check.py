"""Whether this Megatron and this job are what the shims expect; if not, one error says all of it.

It runs once, before the first training step. What it does not find would be missing from every
checkpoint without a word.
"""

from __future__ import annotations

from typing import Any

from megatron.core import package_info

import megatron_flashckpt
from megatron_flashckpt.errors import FlashCkptError, UnsupportedError
from megatron_flashckpt.megatron_lm import features
from megatron_flashckpt.megatron_lm.accounting import unaccounted, underivable, unquantizable
from megatron_flashckpt.megatron_lm.model_state import ModelState

#: What to do about FP8 or FP4 weights that a load could not make of their masters.
QUANTIZED_REMEDY = (
    "such weights are saved and loaded as masters only: train all of them with "
    "--use-distributed-optimizer, save the optimizer (no --no-save-optim), no "
    "--optimizer-cpu-offload and no precision-aware optimizer with delayed scaling; or start "
    "without --fp8-param-gather and --fp4-param-gather"
)


def check(args: Any, state: ModelState, chunks: list[Any], optimizer: Any) -> None:
    """Raise unless all of this rank's state can be saved. No communication.

    Args:
        state: keeps the geometry that is found here for the saves to come.
        chunks: unwrapped.
        optimizer: None: weights only.

    Raises:
        UnsupportedError: names everything that differs.
    """
    # What is looked up next would fail for the same reason as what was looked up before.
    found = (
        features.missing(args)
        or _of_geometry(state, chunks) + unaccounted(chunks, optimizer)
        or _of_quantized(chunks, optimizer)
        or of_derived(state, chunks, optimizer)
        or _of_tensors(state, chunks, optimizer)
    )
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


def of_derived(state: ModelState, chunks: list[Any], optimizer: Any) -> list[str]:
    """Return what keeps weights that are not saved from being made of their masters."""
    derivable = state.derivable(state.geometry(chunks))
    if not derivable or optimizer is None:
        return []
    shared = "FP8 or FP4 weights of the same name in other layers"
    reason = "'weights: derive'" if state.derives_all else shared
    return underivable(chunks, optimizer, derivable, reason)


def _of_quantized(chunks: list[Any], optimizer: Any) -> list[str]:
    found = unquantizable(chunks, optimizer)
    return [f"{line}; {QUANTIZED_REMEDY}" for line in found]


def _of_geometry(state: ModelState, chunks: list[Any]) -> list[str]:
    try:
        state.geometry(chunks)
    except FlashCkptError as error:
        return [str(error)]
    return []


def _of_tensors(state: ModelState, chunks: list[Any], optimizer: Any) -> list[str]:
    try:
        state.owned(state.geometry(chunks), chunks, optimizer)
    except FlashCkptError as error:
        return [str(error)]
    return []
