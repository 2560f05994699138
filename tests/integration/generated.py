"""Small models of unusual shapes and types: some drawn from a seed, some known to be difficult."""

from __future__ import annotations

import random
from typing import Any

OPTIMIZERS = ("fp32", "fp32 distributed", "bf16", "bf16 distributed")
_SHAPES: tuple[list[int], ...] = (
    *([], [1], [7], [0], [65]),
    *([3, 5], [1, 1], [2, 0, 3], [2, 3, 4], [4, 4]),
)
_BUFFER_TYPES = ("int64", "float32", "bool", "uint8", "bfloat16", "float64")
BF16, FP32 = "bfloat16", "float32"

Model = dict[str, Any]
"""A case in the form that `tests/support/jobs/generated_models.py` reads."""


def entry(shape: list[int], *dtypes: str, **more: Any) -> dict[str, Any]:
    """Return a parameter or buffer, with one type for each layer that has the entry."""
    return {"shape": shape, "dtypes": list(dtypes), **more}


def model(name: str, optimizer: str, **more: Any) -> Model:
    """Return a model with the given entries and one trained weight in addition."""
    case = {"name": name, "optimizer": optimizer, "count": 0, "layers": {}, "tied": [], **more}
    case["single"] = {"weight": entry([3, 4], FP32), **more.get("single", {})}
    return case


def _mixed_layers() -> dict[str, Any]:
    return {
        "norm": entry([5], FP32, BF16, BF16),
        "matrix": entry([3, 4], BF16, FP32, BF16, frozen=[False, False, True]),
        "bias": entry([2], BF16, BF16, BF16),
        "counts": entry([3], "int64", "float32", "bool", buffer=True),
    }


def _odd_shapes() -> dict[str, Any]:
    return {
        "scalar": entry([], FP32),
        "scalar16": entry([], BF16),
        "one": entry([1], BF16),
        "none": entry([0], FP32),
        "none16": entry([2, 0, 3], BF16),
        "odd": entry([7, 13], BF16),
        "no_buffer": entry([0, 2], FP32, buffer=True),
        "count": entry([], "int64", buffer=True),
    }


def _odd_memory() -> dict[str, Any]:
    return {
        "turned": entry([5, 3], FP32, transposed=True),
        "turned16": entry([2, 3, 4], BF16, transposed=True),
        "gaps": entry([6], BF16, strided=True),
        "one_of_two": entry([1, 1], FP32, strided=True),
        "turned_buffer": entry([4, 2], FP32, buffer=True, transposed=True),
        "gaps_buffer": entry([1], "int64", buffer=True, strided=True),
    }


def _idle() -> dict[str, Any]:
    return {
        "frozen": entry([3], BF16, frozen=[True]),
        "frozen_turned": entry([2, 3], FP32, frozen=[True], transposed=True),
        "unused": entry([4], BF16, unused=True),
        "embedding": entry([6, 2], BF16),
        "output": entry([6, 2], BF16),
    }


#: Models that must be saved and loaded with every optimizer.
KNOWN: list[Model] = [
    made
    for optimizer in OPTIMIZERS
    for made in (
        model(f"layers of several types, {optimizer}", optimizer, count=3, layers=_mixed_layers()),
        model(f"odd shapes, {optimizer}", optimizer, single=_odd_shapes()),
        model(f"not contiguous, {optimizer}", optimizer, single=_odd_memory()),
        model(
            f"frozen, unused and tied, {optimizer}",
            optimizer,
            single=_idle(),
            tied=[["embedding", "output"]],
            thawed=True,
        ),
    )
]
#: Models that are also saved in Megatron's own format.
KNOWN[0]["torch_dist"] = True
#: Masters replace the 16-bit weights in a save; layer 0 has an fp32 weight under the same key.
KNOWN.append(
    model(
        "layers of several types, derived",
        "bf16 distributed",
        count=3,
        layers={"norm": entry([5], FP32, BF16, BF16), "matrix": entry([3, 4], BF16, BF16, BF16)},
        config={"weights": "derive"},
    )
)
#: Frozen weights have no masters. Layer 2 is on another stage than layers that train.
KNOWN.append(
    model(
        "frozen, derived",
        "bf16 distributed",
        count=3,
        layers={
            "shared": entry([3, 4], BF16, BF16, BF16, frozen=[False, False, True]),
            "trained": entry([3, 4], BF16, BF16, BF16),
        },
        single=_idle(),
        config={"weights": "derive"},
    )
)
#: Optimizer states have the types of their parameters.
KNOWN.append(
    model(
        "layers of several types, fp32 sgd",
        "fp32 sgd",
        count=3,
        layers=_mixed_layers(),
        single={"whole": entry([9], BF16)},
    )
)
#: Models that must be refused before the first step, and patterns of the refusal.
REFUSED: list[tuple[Model, str]] = [
    (
        model(
            "expanded buffer",
            "bf16",
            single={"mask": entry([4, 3], FP32, buffer=True, expanded=True)},
        ),
        r"single\.mask: elements of this tensor share memory \(shape \(4, 3\), strides \(0, 0\)\)",
    ),
    (
        model("complex buffer", "bf16", single={"phase": entry([4], "complex64", buffer=True)}),
        r"single\.phase: torch\.complex64 cannot be stored",
    ),
]


def drawn(seed: int) -> Model:
    """Return a random model; equal seeds give equal models."""
    source = random.Random(seed)
    optimizer = OPTIMIZERS[seed % len(OPTIMIZERS)]
    count = source.choice((0, 1, 2, 2, 3, 4))
    layers = {f"p{number}": _drawn(source, count) for number in range(source.randint(1, 3))}
    single = {f"s{number}": _drawn(source, 1) for number in range(source.randint(0, 3))}
    parameters = [name for name, fields in single.items() if not fields.get("buffer")]
    tied = []
    if len(parameters) > 1 and source.random() < 0.4:
        tied.append(sorted(source.sample(parameters, 2)))
    return model(
        f"drawn from {seed}, {optimizer}",
        optimizer,
        count=count,
        layers=layers if count else {},
        single=single,
        tied=tied,
    )


def _drawn(source: random.Random, count: int) -> dict[str, Any]:
    """Return one parameter or buffer for each of `count` layers."""
    shape = list(source.choice(_SHAPES))
    if source.random() < 0.2:
        dtypes = [source.choice(_BUFFER_TYPES) for _ in range(count)]
        drawn_entry = entry(shape, *dtypes, buffer=True)
    else:
        drawn_entry = entry(shape, *(source.choice((FP32, BF16)) for _ in range(count)))
        kind = source.random()
        if kind < 0.25:
            drawn_entry["frozen"] = [source.random() < 0.6 for _ in range(count)]
        elif kind < 0.4:
            drawn_entry["unused"] = True
    memory = source.random()
    if memory < 0.2:
        drawn_entry["transposed"] = True
    elif memory < 0.3:
        drawn_entry["strided"] = True
    return drawn_entry
