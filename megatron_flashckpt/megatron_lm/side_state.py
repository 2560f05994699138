"""State other than tensors of the model or optimizer: RNG, rerun, scheduler, counters, args.

Every rank saves its own `rank_state`; no rank's random state is treated as a replica of another's.
`common_state` is equal on all ranks; rank 0 writes it to the file `common-<id>.msgpack`. A save
refuses values that a load could not restore exactly, except in Megatron's args.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel

from megatron_flashckpt.errors import CorruptCheckpointError, MissingStateError, UnsupportedError
from megatron_flashckpt.layout.piece import RANK_STATE, Piece
from megatron_flashckpt.megatron_lm import side_state_codec
from megatron_flashckpt.megatron_lm.compat import feature, takes
from megatron_flashckpt.megatron_lm.cutting import LocalPiece
from megatron_flashckpt.megatron_lm.hyper_parameters import hyper_parameters
from megatron_flashckpt.megatron_lm.job_state import JobState
from megatron_flashckpt.megatron_lm.model_geometry import ModelGeometry

logger = logging.getLogger(__name__)

CHECKPOINT_VERSION = 3.0
#: The encoded rank state is padded to a multiple of this many bytes, so that a longer counter does
#: not change the layout.
RANK_STATE_STEP = 16 * 1024
#: Bytes reserved for one module's extra state. TransformerEngine's takes 2 KiB plus the history of
#: absolute maxima; it is empty before the first step.
EXTRA_STATE_NBYTES = 16 * 1024
#: Bytes of this history per step and matrix of the module: 3 fp32 numbers forward, 2 backward.
_AMAX_NBYTES = 5 * 4
#: Matrices assumed for a module without `num_gemms`; a layer norm fused with an MLP has 2.
_NUM_GEMMS = 2
_LENGTH_NBYTES = 8
_RANK_STATE = ("rng", "optimizer", "rerun", "objects")
#: Common state of every checkpoint.
COMMON_STATE = ("checkpoint_version", "iteration", "opt_param_scheduler")
#: Common state that a loop of its own gives to `megatron_flashckpt.Checkpointer`.
OWN_STATE = "side"
#: Common state of a checkpoint of Megatron's own training loop (see `megatron_job`).
MEGATRON_STATE = (*COMMON_STATE, "args", "num_floating_point_operations_so_far")


def rng_state() -> dict[str, Any]:
    """Return the states of all random generators of this rank as tensors and plain values."""
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": {name: _as_tensor(state) for name, state in tracked.items()},
    }


def _as_tensor(state: Any) -> Any:
    """Return a tracker's state as a tensor. Trackers for CUDA graphs hold generators."""
    return state.get_state() if isinstance(state, torch.Generator) else state


def load_rng_state(saved: dict[str, Any]) -> None:
    """Set the states that `rng_state` returned.

    Raises:
        MissingStateError: `saved` has no state for Megatron's tracker; nothing was changed.
    """
    tracker = tensor_parallel.get_cuda_rng_tracker()
    current, tracked = tracker.get_states(), saved["rng_tracker_states"]
    missing = [name for name in current if name not in tracked]
    if current and not tracked:
        raise MissingStateError(
            f"the checkpoint has no state of the random generators {', '.join(missing)}, which "
            "this job uses; add --no-load-rng to keep the states that this job's seed gave them"
        )
    if missing:
        logger.warning(
            "the checkpoint has no state of the random generator %s, which keeps the state that "
            "this job's seed gave it",
            ", ".join(missing),
        )
    version, words, gauss = saved["random_rng_state"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(saved["np_rng_state"]))
    torch.set_rng_state(saved["torch_rng_state"])
    torch.cuda.set_rng_state(saved["cuda_rng_state"])
    restored = {name: _restored(tracker, current.get(name), v) for name, v in tracked.items()}
    tracker.set_states({**current, **restored})


def _restored(tracker: Any, current: Any, saved: torch.Tensor) -> Any:
    """Return `saved` in the form that `tracker` uses: a tensor, or a generator.

    Args:
        current: the tracker's current state of the same name, or None.
    """
    if isinstance(current, torch.Generator):
        # A CUDA graph replays with the generator that was registered when the graph was captured.
        current.set_state(saved)
        return current
    convert = getattr(tensor_parallel, "convert_cuda_rng_state", None)  # since core 0.14
    if current is None and convert is not None:
        graph_safe = tensor_parallel.is_graph_safe_cuda_rng_tracker(tracker)
        return convert(saved, to_graphable=graph_safe)
    return saved


def rank_state(
    chunks: list[Any],
    geometry: ModelGeometry,
    optimizer: Any,
    rerun: Any,
    *,
    save_rng: bool,
) -> dict[str, Any]:
    """Return the state that every rank saves for itself. No communication.

    Args:
        rerun: result of `rerun_state`.
    """
    return {
        "rng": rng_state() if save_rng else None,
        "optimizer": hyper_parameters(optimizer, geometry),
        "rerun": rerun,
        "objects": extra_states(chunks, geometry),
    }


def rerun_state(data_iterator: Any) -> Any:
    """Return the rerun state machine's state while a step is being rerun, else None.

    Since core 0.19 the machine always has a state, which it restores of such a step only.

    Args:
        data_iterator: the training loop's iterator; a list with virtual pipeline stages.
    """
    get_machine = feature("get_rerun_state_machine")
    if get_machine is None:
        return None
    machine = get_machine()
    # Until core 0.11 the parameter is `use_dist_ckpt`, which wraps the complete state.
    early = takes(machine.state_dict, "use_dist_ckpt")
    form = {"use_dist_ckpt": False} if early else {"ckpt_format": "torch_dist"}
    state = machine.state_dict(data_iterator=data_iterator, **form)
    if not is_rerun(machine, state):
        return None
    if hasattr(state.get("sharded"), "data"):
        state["sharded"] = state["sharded"].data
    return state


def is_rerun(machine: Any, state: Any) -> bool:
    """Return whether `machine` restores `state`; before core 0.11: whether there is one."""
    validate = getattr(machine, "validate_state_dict", None)
    return state is not None if validate is None else bool(validate(state))


def frame(state: dict[str, Any], rank: int, world_size: int) -> LocalPiece:
    """Return the rank state as a piece: its length (8 bytes), its encoding, zeros.

    Raises:
        UnsupportedError: a load could not restore some values; names their places and types.
    """
    encoded = side_state_codec.encode(state)
    nbytes = _LENGTH_NBYTES + len(encoded)
    padded = -(-nbytes // RANK_STATE_STEP) * RANK_STATE_STEP
    framed = bytearray(padded)
    framed[:nbytes] = len(encoded).to_bytes(_LENGTH_NBYTES, "little") + encoded
    box = ((world_size, padded), (rank, 0), (1, padded))
    piece = Piece(RANK_STATE, RANK_STATE, "U8", *box, 0, padded)
    return LocalPiece(piece, torch.frombuffer(framed, dtype=torch.uint8), early=True)


def unframe(framed: bytes, place: str) -> dict[str, Any]:
    """Return the rank state from the bytes of its piece.

    Logs a warning with the values that this process cannot restore.

    Raises:
        CorruptCheckpointError: the bytes are not a rank state.
    """
    end = _LENGTH_NBYTES + int.from_bytes(framed[:_LENGTH_NBYTES], "little")
    encoded = framed[_LENGTH_NBYTES:end]
    state = side_state_codec.decode_dict(encoded, place, _RANK_STATE)
    if omitted := side_state_codec.left_out(encoded, place):
        logger.warning(
            "%s: the load leaves out side state that this process cannot restore: %s",
            place,
            ", ".join(omitted),
        )
    return state


def extra_states(chunks: list[Any], geometry: ModelGeometry) -> dict[str, Any]:
    """Return the extra states of modules (TransformerEngine's FP8 state), by global name."""
    return {name: module.get_extra_state() for name, module in _keepers(chunks, geometry)}


def extra_state_names(chunks: list[Any], geometry: ModelGeometry) -> list[str]:
    """Return the global names of the modules' extra states."""
    return [name for name, _ in _keepers(chunks, geometry)]


def extra_states_nbytes(chunks: list[Any], geometry: ModelGeometry) -> int:
    """Return an upper bound of the encoded bytes of `extra_states` after the first step."""
    configs = [getattr(chunk, "config", None) for chunk in chunks]
    quantized = any(getattr(config, name, None) for config in configs for name in ("fp8", "fp4"))
    history = max((getattr(config, "fp8_amax_history_len", 1) for config in configs), default=1)
    nbytes = 0
    for name, module in _keepers(chunks, geometry):
        state = module.get_extra_state()
        # Megatron's own linear layers always return None; TransformerEngine's may return None until
        # their first forward pass in FP8.
        if state is not None or quantized:
            nbytes += len(side_state_codec.encode({name: state})) + EXTRA_STATE_NBYTES
            nbytes += _AMAX_NBYTES * history * getattr(module, "num_gemms", _NUM_GEMMS)
    return nbytes


def load_extra_states(chunks: list[Any], geometry: ModelGeometry, saved: dict[str, Any]) -> None:
    """Load states from `extra_states` into the modules; log the modules with unfit states."""
    unfit = []
    for name, module in _keepers(chunks, geometry):
        if name not in saved:
            continue
        if _fits(module, saved[name]):
            module.set_extra_state(saved[name])
        else:
            unfit.append(name)
    if unfit:
        logger.warning(
            "%d modules of grouped experts keep their present FP8 state, because the checkpoint "
            "was saved under another expert parallel size, with another number of experts per "
            "rank: %s",
            len(unfit),
            ", ".join(unfit),
        )


def _fits(module: Any, saved: Any) -> bool:
    """Return whether an extra state has the same number of experts as `module`.

    The grouped experts of a rank have one state, saved under the name of the first expert.
    TransformerEngine raises no error if the number of experts differs.
    """
    decode = getattr(module, "_decode_extra_state", None)
    if decode is None:
        return True
    state = decode(saved)
    if state is None:  # saved without FP8
        return True
    count = state.get("extra_fp8_variables", {}).get("num_gemms", module.num_gemms)
    return bool(count == module.num_gemms)


def _keepers(chunks: list[Any], geometry: ModelGeometry) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules that have an extra state, each with Megatron's global name of the state.

    Megatron lists an entry for every layer that could have an extra state. The modules are looked
    up once per geometry, which is computed anew when a module is replaced.
    """
    if geometry.keepers is None:
        geometry.keepers = list(_listed_modules(chunks, geometry))
    for global_name, module in geometry.keepers:
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            yield global_name, module


def _listed_modules(chunks: list[Any], geometry: ModelGeometry) -> Iterator[tuple[str, Any]]:
    """Yield the modules whose extra states `geometry` lists, each with the global name."""
    for number, name, global_name in geometry.objects:
        *path, leaf = name.split(".")
        module = chunks[number] if leaf == "_extra_state" else None
        for step in path:  # few modules; `named_modules` would build the names of all
            module = None if module is None else module._modules.get(step)
        if module is not None:
            yield global_name, module


def common_state(job: JobState, iteration: int) -> dict[str, Any]:
    """Return the state that is equal on all ranks, under Megatron's own names."""
    scheduler = job.scheduler if job.saved_optimizer is not None else None
    return {
        **job.common,
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": iteration,
        "opt_param_scheduler": scheduler.state_dict() if scheduler is not None else None,
    }


def decode_common(encoded: bytes, place: str, needs: Collection[str]) -> dict[str, Any]:
    """Return the common state that `encode_common` encoded.

    Args:
        place: name of the file, for messages.
        needs: keys that the caller cannot do without.

    Raises:
        CorruptCheckpointError: the bytes are not a common state, or lack a key.
        UnsupportedError: Megatron's args are needed, and a loop of its own has saved.
    """
    try:
        return side_state_codec.decode_dict(encoded, place, needs)
    except CorruptCheckpointError:
        state = side_state_codec.decode(encoded, place)
        if not (isinstance(state, dict) and OWN_STATE in state and "args" in needs):
            raise
    raise UnsupportedError(
        f"{place}: megatron_flashckpt.Checkpointer has saved this checkpoint from a training loop "
        "of its own, so it has no Megatron arguments; load it with Checkpointer.load, or only its "
        "weights with --finetune"
    )


def encode_common(state: dict[str, Any]) -> bytes:
    """Return the common state as bytes.

    Raises:
        UnsupportedError: a load could not restore some values outside Megatron's args.
    """
    return side_state_codec.encode(state, lossy=("args",))
