"""Element types by their safetensors names."""

from __future__ import annotations

from megatron_flashckpt.errors import LayoutError

#: Bytes per element.
ITEMSIZE = {
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "BF16": 2,
    "F16": 2,
    "I16": 2,
    "U8": 1,
    "I8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}
#: Types of weights that a load can derive from their fp32 masters (`weights: derive`).
DERIVED_TYPES = frozenset(("BF16", "F16"))


def itemsize(dtype: str) -> int:
    """Return the bytes of one element of `dtype`."""
    try:
        return ITEMSIZE[dtype]
    except KeyError:
        raise LayoutError(
            f"element type {dtype!r} cannot be stored; known: {', '.join(ITEMSIZE)}"
        ) from None
