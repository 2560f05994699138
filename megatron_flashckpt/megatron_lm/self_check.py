"""Checks that Megatron and the job match what the shims expect; one error lists all differences.

The check runs once, before the first training step. State that it overlooks would be missing from
every checkpoint without a message.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from megatron.core import package_info

import megatron_flashckpt
from megatron_flashckpt.errors import FlashCkptError, UnsupportedError
from megatron_flashckpt.megatron_lm.accounting import unaccounted, underivable, unquantizable
from megatron_flashckpt.megatron_lm.job_state import JobState
from megatron_flashckpt.megatron_lm.load_pieces import refuse_unfillable
from megatron_flashckpt.megatron_lm.model_state import ModelState

#: Remedy for FP8 or FP4 weights that a load could not make from their masters; the last line.
QUANTIZED_REMEDY = (
    "FP8 and FP4 weights are saved and loaded as fp32 masters only: train all of them with "
    "--use-distributed-optimizer, save the optimizer (no --no-save-optim), and use neither "
    "--optimizer-cpu-offload nor a precision-aware optimizer with delayed scaling or 16-bit "
    "masters; or start without --fp8-param-gather and --fp4-param-gather"
)

#: Remedy for plain weights that a load could not derive from their masters; the last line.
DERIVED_REMEDY = (
    "set 'weights: store', the default; or train every 16-bit weight with "
    "--use-distributed-optimizer and full fp32 masters"
)


def check(job: JobState, state: ModelState) -> None:
    """Raise if a part of this rank's state cannot be saved. No communication.

    Args:
        state: caches the geometry for later saves.

    Raises:
        UnsupportedError: lists all differences.
    """
    chunks, optimizer = job.chunks, job.saved_optimizer
    # After a failed check the later checks are skipped: they would fail for the same reason.
    lines = (
        job.differences()
        or _converted(chunks)
        or _refusal_of(lambda: state.geometry(chunks)) + unaccounted(chunks, optimizer)
        or _with_remedy(unquantizable(chunks, optimizer), QUANTIZED_REMEDY)
        or of_derived(state, chunks, optimizer)
        or _refusal_of(lambda: state.owned(state.geometry(chunks), chunks, optimizer))
        or _refusal_of(lambda: refuse_unfillable(state.geometry(chunks), chunks, optimizer))
    )
    if lines:
        raise refusal(lines)


def refusal(lines: list[str]) -> UnsupportedError:
    """Return the error with `lines`; every line names state that would not be saved."""
    listed = "\n  ".join(lines)
    return UnsupportedError(
        f"megatron_flashckpt {megatron_flashckpt.__version__} would not save all of this job under "
        f"megatron-core {package_info.__version__}:\n  {listed}\n"
        "Nothing was saved or changed. Install a release of megatron_flashckpt that knows this "
        "Megatron-LM, or start with Megatron's own checkpointing (without the launcher, the "
        "patch or the swapped imports)"
    )


def of_derived(state: ModelState, chunks: list[Any], optimizer: Any) -> list[str]:
    """Return a line for each reason why unsaved weights cannot be derived from their masters.

    The last line is the remedy.
    """
    derivable = state.derivable(state.geometry(chunks))
    if not derivable or optimizer is None:
        return []
    shared = "FP8 or FP4 weights of the same name in other layers"
    reason = "'weights: derive'" if state.derives_all else shared
    lines = underivable(chunks, optimizer, derivable, reason)
    return _with_remedy(lines, DERIVED_REMEDY if state.derives_all else QUANTIZED_REMEDY)


def _with_remedy(lines: list[str], remedy: str) -> list[str]:
    return [*lines, remedy] if lines else []


def _converted(chunks: list[Any]) -> list[str]:
    """Return a line if ModelOpt has converted the model: its state is outside the state dict."""
    modelopt: Any = sys.modules.get("modelopt.torch.opt")
    if modelopt is None or not any(map(modelopt.ModeloptStateManager.is_converted, chunks)):
        return []
    return ["ModelOpt has converted the model (for quantization, pruning or distillation)"]


def _refusal_of(attempt: Callable[[], object]) -> list[str]:
    """Return the message with which `attempt` refuses the job, as one line."""
    try:
        attempt()
    except FlashCkptError as error:
        return [str(error)]
    return []
