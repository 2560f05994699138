"""Rows of embeddings that a load may cut or fill with zeros: only the padding of the vocabulary.

Megatron pads the vocabulary to a multiple that depends on the tensor parallel size, and lets a load
change the padding (`allow_shape_mismatch`). It cannot know whether rows of words are meant.
"""

from __future__ import annotations

from typing import Any


def least_words(args: Any) -> int | None:
    """Return the number of words of a job's vocabulary, or a lower bound; None if args lack it.

    A tokenizer may bring its own vocabulary, which args do not name: the padding is then less than
    the multiple to which Megatron pads.
    """
    padded = getattr(args, "padded_vocab_size", None)
    if not isinstance(padded, int):
        return None
    named = getattr(args, "vocab_size", None)
    if isinstance(named, int):
        named += getattr(args, "tokenizer_type", None) == "NullTokenizer"  # its end of document
        if named <= padded:
            return named
    divisor = getattr(args, "make_vocab_size_divisible_by", None) or 1
    ways = getattr(args, "tensor_model_parallel_size", None) or 1
    return max(padded - divisor * ways + 1, 0)


def resized(rows: int, stored_rows: int) -> str:
    """Return the text for an embedding whose number of rows differs from the stored one."""
    change = f"{stored_rows} rows in the checkpoint, {rows} in the model"
    if rows < stored_rows:
        return f"{change}: rows of words are cut off (from {rows} on)"
    return f"{change}: rows of words are not stored and become zero (from {stored_rows} on)"


def loses_words(rows: int, stored_rows: int, words: int | None, stored_words: int | None) -> bool:
    """Return whether rows of words, not of padding, would be cut off or become zero.

    Args:
        words, stored_words: results of `least_words` for this job and the saving job; if one is
            None, every row counts as a word.
    """
    if rows < stored_rows:
        return stored_words is None or rows < stored_words
    return rows > stored_rows and (words is None or stored_rows < words)
