"""Rows of an embedding that a load may cut or add without --finetune: those of padding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_flashckpt.megatron_lm.vocabulary import least_words, loses_words


def job(words: int | None, padded: int, ways: int = 1) -> Any:
    return SimpleNamespace(
        vocab_size=words,
        padded_vocab_size=padded,
        tokenizer_type="NullTokenizer" if words else "HuggingFaceTokenizer",
        make_vocab_size_divisible_by=128,
        tensor_model_parallel_size=ways,
    )


@pytest.mark.parametrize(
    ("saved", "now", "is_refused"),
    [
        (job(500, 512), job(300, 384), True),
        (job(500, 512), job(600, 640), True),
        (job(500, 512), job(505, 512), False),  # the same rows: Megatron, too, accepts that
        (job(500, 1024, 8), job(500, 512), False),
        (job(500, 512), job(500, 1024, 8), False),
        (job(None, 512), job(None, 384), True),
        (job(None, 512), job(None, 640), True),
        (job(None, 1024, 8), job(None, 512), False),
        (job(None, 512), job(None, 1024, 8), False),
        (SimpleNamespace(), job(500, 384), True),
        (job(500, 512), SimpleNamespace(padded_vocab_size=640), True),
    ],
)
def test_only_rows_of_words_are_refused(saved: Any, now: Any, is_refused: bool) -> None:
    stored_rows, rows = getattr(saved, "padded_vocab_size", 512), now.padded_vocab_size
    assert loses_words(rows, stored_rows, least_words(now), least_words(saved)) == is_refused
