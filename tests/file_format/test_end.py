"""The end of a failed save: readers get its meaning, whatever the reason is."""

from __future__ import annotations

import pytest

from megatron_flashckpt.file_format.end import (
    FAILED_NBYTES,
    Failure,
    decode_failure,
    encode_failure,
)


@pytest.mark.parametrize("character", ["x", "\x01", "\U0001f4be", "\udcff"], ids=ascii)
def test_a_long_reason_is_shortened_and_its_end_read_whole(character: str) -> None:
    encoded = encode_failure(Failure(failed="rank 0: " + 70_000 * character, is_final=True))
    assert len(encoded) <= FAILED_NBYTES
    failure = decode_failure(encoded)
    assert failure.failed.startswith("rank 0: ")
    assert failure.is_final
