"""The description of a run in the manifest, from args of any types."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec

from megatron_flashckpt.megatron_lm.job_description import facts


class Number(int):
    pass


def test_args_of_other_types_do_not_end_a_save() -> None:
    args = SimpleNamespace(hidden_size=Number(32), num_layers=object(), world_size=4)
    description = msgspec.msgpack.decode(msgspec.msgpack.encode(facts(args)))
    assert (description["hidden_size"], description["world_size"]) == (32, 4)
    assert description["num_layers"] is None
