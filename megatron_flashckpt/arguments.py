"""SHIM: `load_args_from_checkpoint`, for `--use-checkpoint-args`.

Swap the import in `megatron/training/initialize.py` (core 0.19 and later: `arguments.py`):

    from megatron_flashckpt.arguments import load_args_from_checkpoint

Megatron selects the arguments to take; this module only reads them from our checkpoint. Megatron
imports this module during its own import, so the module must not import Megatron at its top level.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import xxhash

from megatron_flashckpt.catalog.lineage import Save
from megatron_flashckpt.collectives import Attempt, ErrorReport
from megatron_flashckpt.errors import FlashCkptError, is_damage
from megatron_flashckpt.file_format.file_names import common_name
from megatron_flashckpt.storage.opening import absolute, open_store
from megatron_flashckpt.storage.retrying_store import RetryingStore, load_patience_s
from megatron_flashckpt.storage.store import Store

logger = logging.getLogger(__name__)


def load_args_from_checkpoint(args: Any, *more: Any, **named: Any) -> Any:
    """Set arguments from the checkpoint that a load will use, as Megatron's own function does.

    Every rank calls it before torch.distributed is initialised. One rank of each node reads (see
    `load.node_leader`).

    Raises:
        FlashCkptError: the checkpoint is damaged, and `damaged` is `stop` or no older one is left.
    """
    from megatron_flashckpt.load import argument_source
    from megatron_flashckpt.megatron_lm import stock
    from megatron_flashckpt.megatron_lm.compat import is_known_to_msc_alone

    module: Any = stock.checkpointing()
    original = stock.original("checkpointing", "load_args_from_checkpoint")
    bound = stock.bind(original, (args, *more), named)
    load_arg = bound.get("load_arg", "load")
    root = getattr(args, load_arg, None)
    source = None
    if root is not None and not is_known_to_msc_alone(args, root):
        source = _source(root, getattr(args, "ckpt_step", None))
    argument_source.note(load_arg, None)
    if source is None:
        return original(args, *more, **named)
    state, before = source.state(), _shown(args)
    # Since core 0.9 the type of the checkpoint comes last; this caller ignores it.
    loaded = (
        (state, root, False, None) if hasattr(module, "CheckpointType") else (state, root, False)
    )
    read = module._load_base_checkpoint
    module._load_base_checkpoint = lambda *_, **__: loaded
    try:
        result = original(args, *more, **named)
    finally:
        module._load_base_checkpoint = read
    digest = xxhash.xxh3_64_hexdigest(repr(sorted(_shown(args) - before)).encode())
    source_note = argument_source.ArgumentSource(state["iteration"], source.save_id, digest)
    argument_source.note(load_arg, source_note)
    return result


def _shown(args: Any) -> set[tuple[str, str]]:
    """Return all arguments and their values, without the iteration, which a load sets again."""
    return {(name, repr(value)) for name, value in vars(args).items() if name != "iteration"}


def _source(root: str, step: int | None) -> _Source | None:
    """Return the checkpoint to resume from; None if it is not one of ours."""
    from megatron_flashckpt.load import node_leader

    attempt = node_leader.read_once(
        f"arguments\0{absolute(root)}\0{step}",
        lambda: _attempt(root, step),
        _encoded,
        _decoded,
    )
    if attempt.error is not None:
        raise attempt.error
    return attempt.value


class _Source(msgspec.Struct, frozen=True):
    """Common state of one checkpoint."""

    save_id: str
    name: str
    """Name of the file, for messages."""
    encoded: bytes

    def state(self) -> dict[str, Any]:
        from megatron_flashckpt.megatron_lm import side_state

        return side_state.decode_common(self.encoded, self.name, side_state.MEGATRON_STATE)


class _Result(msgspec.Struct, frozen=True):
    """Message of the reading rank to the other ranks of the node."""

    source: _Source | None
    """None if there is no checkpoint of ours, or it was refused."""
    refusal: ErrorReport | None


def _encoded(attempt: Attempt[_Source | None]) -> bytes:
    return msgspec.msgpack.encode(_Result(attempt.value, attempt.report))


_RESULT = msgspec.msgpack.Decoder(_Result)


def _decoded(encoded: bytes) -> Attempt[_Source | None]:
    result = _RESULT.decode(encoded)
    refusal = None if result.refusal is None else result.refusal.error()
    return Attempt(result.source, refusal)


def _attempt(root: str, step: int | None) -> Attempt[_Source | None]:
    try:
        return Attempt(_read(root, step), None)
    except FlashCkptError as error:
        return Attempt(None, error)


def _read(root: str, step: int | None) -> _Source | None:
    from megatron_flashckpt.catalog.stored_checkpoint import StoredCheckpoint, read_manifest

    store = RetryingStore(open_store(root), total_s=load_patience_s())
    refused: FlashCkptError | None = None
    for save in _saves(store, step):
        try:
            stored = StoredCheckpoint(store, save, read_manifest(store, save))
            name = f"{stored.place}/{common_name(save.save_id)}"
            source = _Source(save.save_id, name, stored.common())
            source.state()  # raises here, where an older checkpoint can replace a damaged one
            return source
        except FlashCkptError as error:
            if not is_damage(error):
                raise
            logger.error("iteration %d: its arguments cannot be read: %s", *(save.iteration, error))
            refused = refused or error
    if refused is not None:
        raise refused
    return None


def _saves(store: Store, step: int | None) -> list[Save]:
    """Return the checkpoints to try: the named one, then older ones with `damaged: fall_back`."""
    from megatron_flashckpt.load.named_checkpoint import loadable_saves
    from megatron_flashckpt.save.session import session

    saves = loadable_saves(store, int(step) if step else None)
    return saves if session.config.damaged == "fall_back" else saves[:1]
