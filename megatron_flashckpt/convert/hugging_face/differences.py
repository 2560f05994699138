"""Refusal of tensors that are not those of a model."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_flashckpt.errors import UnsupportedError, first_few


def refuse(
    place: str,
    template: str,
    remedy: str,
    *,
    missing: Sequence[str],
    extra: Sequence[str],
    wrong: Sequence[str],
) -> None:
    """Raise if any tensor differs.

    Args:
        place: where the tensors are.
        template: the `config.json` that they should fit.
        missing, extra: names of tensors.
        wrong: a phrase for each tensor of another shape.

    Raises:
        UnsupportedError: the message has the first names of each kind.
    """
    problems = [
        f"{phrase} {first_few(names)}"
        for phrase, names in (
            ("missing tensors:", missing),
            ("tensors that this model does not have:", extra),
            ("tensors of another shape:", wrong),
        )
        if names
    ]
    if problems:
        raise UnsupportedError(
            f"{place}: is not the model of {template}: {'; '.join(problems)}; nothing was written; "
            f"{remedy}"
        )
