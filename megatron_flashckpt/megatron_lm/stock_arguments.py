"""Arguments of `save_checkpoint` and `load_checkpoint` that the shim does not act on.

Some arguments need no action. All others are accepted only at their defaults: a request of a newer
Megatron must not be ignored silently.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch.distributed as dist

from megatron_flashckpt.errors import UnsupportedError
from megatron_flashckpt.megatron_lm import parallel

#: These control how Megatron writes its own formats and finds its local checkpoints.
_NOT_NEEDED = frozenset(
    {"checkpointing_context", "preprocess_common_state_dict_fn", "ft_client", "terminate"}
)


def refuse_unknown(
    function: str, signature: inspect.Signature, named: dict[str, Any], used: Collection[str]
) -> None:
    """Raise if an argument outside `used` matters and differs from its default.

    Args:
        named: the arguments by name, with or without defaults.
        used: names of the parameters that the shim acts on.

    Raises:
        UnsupportedError: names all such arguments.
    """
    unknown = []
    for name, value in named.items():
        if name in used or name in _NOT_NEEDED or _is_default(value, signature.parameters[name]):
            continue
        own = _OWN_GROUPS.get(name)
        if own is None or not _is_same_group(value, own()):
            unknown.append(f"{name}={_shown(value)}")
    if unknown:
        raise UnsupportedError(
            f"{function} was called with {', '.join(unknown)}, which this release of "
            "megatron_flashckpt does not know how to follow; leave it at its default, or keep "
            "Megatron's own checkpointing for this call"
        )


#: Since core 0.16 callers may pass process groups; the job's own groups are accepted.
_OWN_GROUPS: dict[str, Callable[[], Any]] = {
    "tp_group": parallel.tensor_parallel_group,
    "pp_group": parallel.pipeline_parallel_group,
    "dp_cp_group": parallel.data_parallel_group,
    "dp_group": lambda: parallel.data_parallel_group(with_context_parallel=False),
    "expt_dp_group": parallel.expert_data_parallel_group,
}


def _is_same_group(one: Any, other: Any) -> bool:
    return one is other or (
        isinstance(one, dist.ProcessGroup)
        and dist.get_process_group_ranks(one) == dist.get_process_group_ranks(other)
    )


def _is_default(value: Any, parameter: inspect.Parameter) -> bool:
    if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
        return not value
    # Not `==` alone: comparing tensors returns a tensor.
    return value is parameter.default or (
        isinstance(value, str | int | float) and bool(value == parameter.default)
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
