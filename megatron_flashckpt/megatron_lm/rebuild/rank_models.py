"""Local models of all ranks of a job, from its args, for every supported model class."""

from __future__ import annotations

from typing import Any

from megatron_flashckpt.megatron_lm.rebuild import legacy_gpt
from megatron_flashckpt.megatron_lm.rebuild.rank_model import LOAD_IT, RankModel


def rank_models(args: Any, remedy: str = LOAD_IT) -> list[RankModel]:
    """Return the local models of the layout in `args`, one per model-parallel coordinate.

    Args:
        remedy: end of the message if the model cannot be rebuilt.

    Raises:
        UnsupportedError: the model cannot be rebuilt.
    """
    if legacy_gpt.is_legacy_gpt(args):
        return legacy_gpt.rank_models(args)
    # Imported late: a Megatron of early 2024, whose jobs trained the legacy GPT, cannot import it.
    from megatron_flashckpt.megatron_lm.rebuild import model

    return model.rank_models(args, remedy)
