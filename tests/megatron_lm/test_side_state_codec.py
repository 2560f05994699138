"""Round trips of side state with a plain form, and decoding that runs no code."""

from __future__ import annotations

import argparse
import collections
import enum
import functools
import io
import os
import pathlib
import pickle
import sys
import types

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megatron_flashckpt.errors import CorruptCheckpointError, UnsupportedError
from megatron_flashckpt.megatron_lm import side_state_codec

PLACE = "iter_0000007/common.msgpack"
TAG = "__flashckpt__"


class Colour(enum.Enum):
    RED = "red"
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1


class Options(enum.Flag):
    A = 1
    B = 2


class Outer:
    class Inner(enum.Enum):
        ONE = 1


class Opaque:
    """Class without a plain form."""


Pair = collections.namedtuple("Pair", "a b")


def round_trip(value):
    return side_state_codec.decode(side_state_codec.encode(value), PLACE)


def lossy_round_trip(value):
    encoded = side_state_codec.encode({"args": value, "iteration": 7}, lossy=("args",))
    decoded = side_state_codec.decode(encoded, PLACE)
    assert decoded.pop("iteration") == 7
    return decoded.get("args")


def refusal(value) -> str:
    """Return the message with which `encode` refuses `value`."""
    with pytest.raises(UnsupportedError) as refused:
        side_state_codec.encode(value)
    return str(refused.value)


def refusal_of(*lost: str) -> str:
    return (
        f"a load could not restore this side state: {', '.join(lost)}; keep it as tensors, "
        "numbers, text, or lists and dicts of them, or use Megatron's own checkpointing for this "
        "job"
    )


def saved(tree) -> bytes:
    """Return `tree` as bytes without the checks of `encode`, as a hostile writer could."""
    return msgspec.msgpack.encode(tree)


atoms = (
    st.none()
    | st.booleans()
    | st.integers(-(2**130), 2**130)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(max_size=5)
    | st.text(st.characters(categories=["Cs"]), max_size=2)
    | st.just(TAG)
    | st.binary(max_size=5)
    | st.sampled_from([*Colour, *Level, *Outer.Inner, torch.bfloat16, torch.float8_e4m3fn])
)
hashables = st.recursive(
    atoms,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
trees = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(hashables, inner, max_size=3)
        | st.sets(hashables, max_size=3)
        | st.frozensets(hashables, max_size=3)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(
            lambda fields: argparse.Namespace(**fields)
        )
    ),
    max_leaves=10,
)


def typed(value):
    """Return `value` with the types of all parts, because 1 == True == 1.0."""
    if isinstance(value, argparse.Namespace):
        return ("namespace", typed(vars(value)))
    if isinstance(value, dict):
        return ("dict", [(typed(key), typed(item)) for key, item in value.items()])
    if isinstance(value, list | tuple):
        return (type(value), [typed(item) for item in value])
    if isinstance(value, set | frozenset):
        return (type(value), sorted(repr(typed(item)) for item in value))
    return (type(value), value)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trees)
@example({TAG: "tuple", "value": [1]})  # as the codec stores `(1,)`
def test_every_plain_value_is_restored_with_its_type(tree):
    assert typed(round_trip(tree)) == typed(tree)


@pytest.mark.parametrize("pair", [Pair(1, 2), Pair(Pair(Colour.RED, torch.ones(2)), [Pair(0, ())])])
def test_a_named_tuple_is_restored_as_a_named_tuple(pair):
    restored = round_trip({"a": pair, pair[:0]: 1})["a"]
    assert type(restored) is Pair
    assert repr(restored) == repr(pair)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.arange(6, dtype=np.uint32)[::2],
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(3, dtype=">i4"),
        np.array(3.5),
        np.zeros((0, 3)),
        np.array([], dtype=np.uint8),
        np.array([True, False]),
        np.array([1 + 2j]),
        np.array(["ab", "c"]),
    ],
    ids=str,
)
def test_an_array_is_restored_writable_with_shape_and_type(array):
    back = round_trip({"a": array})["a"]
    assert (back.shape, back.dtype) == (array.shape, array.dtype)
    np.testing.assert_array_equal(back, array)
    assert back.flags.writeable


@pytest.mark.parametrize(
    ("value", "restored"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.bytes_(b""), b""),
        (np.complex64(1j), 1j),
        (pathlib.PurePosixPath("/a/b"), "/a/b"),
        (torch.Size([2, 3]), (2, 3)),
        (types.SimpleNamespace(a=1), argparse.Namespace(a=1)),
        (
            collections.OrderedDict(b=1, a=collections.defaultdict(list, c=[2])),
            {"b": 1, "a": {"c": [2]}},
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_of_other_classes_are_restored_as_plain_ones(value, restored):
    assert typed(round_trip([value])) == typed([restored])


@pytest.mark.parametrize("contents", [b"", b"some bytes"])
def test_a_buffer_is_restored_whatever_its_position(contents):
    buffer = io.BytesIO(contents)
    buffer.seek(0, io.SEEK_END)
    back = round_trip({"extra_state": buffer})["extra_state"]
    assert isinstance(back, io.BytesIO)
    assert back.read() == contents


def test_a_tensor_is_restored_on_the_cpu_without_unused_storage():
    whole = torch.arange(1_000_000, dtype=torch.float32, requires_grad=True)
    encoded = side_state_codec.encode(
        {"slice": whole[10:13], "parameter": torch.nn.Parameter(torch.ones(2))}
    )
    assert len(encoded) < 10_000
    back = side_state_codec.decode(encoded, PLACE)
    assert back["slice"].tolist() == [10.0, 11.0, 12.0]
    assert type(back["parameter"]) is torch.Tensor
    assert not back["slice"].requires_grad


def test_encoded_bytes_do_not_change_with_the_original_tensor():
    tensor = torch.zeros(2)
    tree = side_state_codec.to_plain({"t": tensor})
    tensor.fill_(7)
    assert side_state_codec.from_plain(tree)["t"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    ],
    ids=str,
)
def test_a_tensor_of_any_type_is_restored_bit_for_bit(dtype):
    bits = torch.arange(16, dtype=torch.uint8).bitwise_and(1 if dtype == torch.bool else 255)
    for tensor in (bits.view(dtype), bits.view(dtype)[0], bits.view(dtype)[:0].reshape(0, 3)):
        back = round_trip({"t": tensor})["t"]
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert back.reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))


def test_a_view_of_a_tensor_is_restored_with_its_elements():
    whole = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    assert round_trip(whole.T[1:])[0].equal(whole.T[1])
    assert round_trip(torch.complex(whole, whole).conj()).equal(torch.complex(whole, -whole))


@pytest.mark.parametrize(
    "unknown",
    [
        Opaque(),
        Opaque,
        len,
        np.array([object()]),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")]),
        np.ma.masked_array([1, 2], mask=[False, True]),
        np.datetime64("2024-01-01"),
        np.longdouble(1),
        bytearray(b"x"),
        torch.Generator(),
        torch.eye(2).to_sparse(),
        Options.A | Options.B,
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_without_a_plain_form_is_refused_or_left_out_under_lossy_keys(unknown):
    kind = f"{type(unknown).__module__}.{type(unknown).__qualname__}".replace("builtins.", "")
    tree = {"u": unknown, "l": [1, {"m": unknown}, 2], "t": (unknown,)}
    assert refusal(tree) == refusal_of(f"u ({kind})", f"l[1].m ({kind})", f"t[0] ({kind})")
    tree["n"] = argparse.Namespace(a=unknown, b=3)
    kept = {"l": [1, {}, 2], "t": (), "n": argparse.Namespace(b=3)}
    assert typed(lossy_round_trip(tree)) == typed(kept)
    assert lossy_round_trip(unknown) is None


def test_a_namespace_may_have_any_names() -> None:
    """Frameworks fill `vars(args)` from YAML. Before, such a checkpoint was called damaged."""
    args = argparse.Namespace(lr=1.0)
    vars(args).update({5: "five", "self": 1, "no identifier": 2})
    assert vars(round_trip(args)) == vars(args)
    assert vars(lossy_round_trip(args)) == vars(args)


class Text(str):
    def __str__(self):
        return "another text"


class Number(int):
    def __int__(self):
        return -1


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no text")


def holder_of_itself(kind):
    if kind is argparse.Namespace:
        held = kind(n=1)
        held.me = held
    elif kind is dict:
        held = {"n": 1}
        held["me"] = held
    else:
        held = [1]
        held.append(held)
    return held


def nested(levels):
    return functools.reduce(lambda inner, _: [inner], range(levels), 1)


@pytest.mark.parametrize("value", [Text("a"), Number(3)], ids=["text", "number"])
def test_subclasses_of_text_and_numbers_are_restored_as_their_base(value):
    base = type(value).__base__
    for back in (round_trip([value])[0], lossy_round_trip(argparse.Namespace(odd=value)).odd):
        assert type(back) is base
        assert base.__eq__(value, back)


@pytest.mark.parametrize(
    "odd",
    [
        *map(holder_of_itself, (dict, list, argparse.Namespace)),
        Unprintable(),
        torch.empty(3, device="meta"),
        nested(150),
        nested(2000),
    ],
    ids=["dict", "list", "namespace", "no text", "meta", "deep", "deeper"],
)
def test_only_args_may_hold_a_value_that_cannot_be_stored(odd):
    """A checkpoint is worth more than one argument: training must not end at the first save."""
    args = argparse.Namespace(hidden_size=32, odd=odd)
    assert vars(lossy_round_trip(args)) == {"hidden_size": 32}
    args.odd = args
    assert vars(lossy_round_trip(args)) == {"hidden_size": 32}
    if odd != nested(150):  # which lies within the limit of other state
        with pytest.raises(UnsupportedError):
            side_state_codec.encode({"args": args, "scheduler": [odd]}, lossy=("args",))


def test_a_refusal_names_the_place_of_the_value_in_any_container():
    tree = {
        TAG: {(1, "a"): len},
        "namespace": argparse.Namespace(a=[len]),
        "pair": Pair(1, len),
        "set": {len},
        "keys": {len: 1},
        "ö": len,
    }
    kind = "(builtin_function_or_method)"
    assert refusal(tree) == refusal_of(
        f"__flashckpt__[(1, 'a')] {kind}",
        f"namespace.a[0] {kind}",
        f"pair[1] {kind}",
        f"set[0] {kind}",
        f"keys.keys() {kind}",
        f"ö {kind}",
    )


def test_a_class_that_cannot_be_imported_is_refused():
    class Local(enum.Enum):
        A = 1

    Triple = collections.namedtuple("Triple", "a b c")
    place = f"{__name__}.test_a_class_that_cannot_be_imported_is_refused.<locals>"
    assert refusal({"e": Local.A, "t": Triple(1, 2, 3)}) == refusal_of(
        f"e ({place}.Local)", f"t ({__name__}.Triple)"
    )


def test_values_without_plain_form_are_left_out_of_dicts_and_sets():
    tree = {TAG: Opaque(), Opaque(): 1, Colour.RED: 2, "s": {Opaque, 3}, "p": Pair(1, len)}
    assert typed(lossy_round_trip(tree)) == typed({Colour.RED: 2, "s": {3}})


def test_any_msgpack_reader_shows_stored_and_omitted_values():
    encoded = side_state_codec.encode({"lr": 0.5, "betas": (0.9, 1), "f": len}, lossy=("f",))
    tree = msgspec.msgpack.decode(encoded)
    betas = {TAG: "tuple", "value": [0.9, 1]}
    kind = "builtins:builtin_function_or_method"
    left_out = {TAG: "repr", "class": kind, "value": "<built-in function len>"}
    assert tree == {"lr": 0.5, "betas": betas, "f": left_out}


class Bomb:
    """Object that creates a directory when it is unpickled."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_pickle_bomb_is_refused_without_running(tmp_path):
    made = tmp_path / "made"
    with pytest.raises(CorruptCheckpointError, match=f"{PLACE}: side state is damaged"):
        side_state_codec.decode(pickle.dumps({"args": [1, Bomb(made)]}), PLACE)
    assert not made.exists()


def nested_tags(levels: int) -> dict:
    return functools.reduce(lambda inner, _: {TAG: "tuple", "value": [inner]}, range(levels), 1)


@pytest.mark.parametrize(
    "encoded",
    [
        *(b"", b"not a checkpoint", b"PK\x03\x04", saved([1])[:-1], saved([1]) + b"\0"),
        # These claim a size that they do not have.
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff" + bytes(100),
        b"\xc6\xff\xff\xff\xff" + bytes(100),
        b"\x91" * 1_000_000,
        b"\x81\xa1a" * 1_000_000,
        # MessagePack decodes deeper nesting than the codec restores.
        saved({"args": nested_tags(400)}),
        *(
            saved({"a": {TAG: tag, **fields}})
            for tag, fields in (
                ("ndarray", {"dtype": "O", "shape": [1], "value": b"12345678"}),
                ("ndarray", {"dtype": "<f4", "shape": [5], "value": b"1234"}),
                ("ndarray", {"dtype": "no such type", "shape": [1], "value": b"1234"}),
                ("enum", {}),
                ("enum", {"class": 7, "value": "x"}),
                ("dict", {"items": [1]}),
                ("namespace", {"value": [1]}),
                ("set", {"value": [[1]]}),
                ("bytesio", {"value": "text"}),
                ("tuple", {"value": b"1234567"}),
                ("tuple", {"value": {}}),
                ("tuple", {}),
                ("int", {"value": 7}),
                ("int", {"value": "no number"}),
                ("str", {"value": b"\xff"}),
                ("complex", {"value": [1, 2, 3]}),
                ("tensor", {"dtype": "torch.float32", "shape": [5], "value": b"1234"}),
                ("tensor", {"dtype": "torch.float32", "shape": [-1], "value": b"1234"}),
                ("tensor", {"dtype": "torch.float32", "shape": [1], "value": b""}),
                ("tensor", {"dtype": "torch.load", "shape": [1], "value": b"1234"}),
                ("tensor", {"dtype": "torch.uint8", "shape": ["a"], "value": b"1"}),
            )
        ),
    ],
    ids=lambda encoded: repr(encoded[:60]),
)
def test_damaged_bytes_are_refused(encoded):
    with pytest.raises(CorruptCheckpointError, match=rf"(?s){PLACE}: .*--ckpt-step"):
        side_state_codec.decode(encoded, PLACE)


def enum_tag(path: str, name: str) -> dict:
    return {TAG: "enum", "class": path, "value": name}


NAMED_TUPLES = [
    ("tests.megatron_lm.test_side_state_codec:Absent", [1, 2]),
    ("module_that_is_not_imported:Pair", [1, 2]),
    (f"{__name__}:Pair", [1]),
    (f"{__name__}:Opaque", [1, 2]),
    ("os:system", ["true"]),
    ("builtins:tuple", [1, 2]),
]
MEMBERS = [
    (f"{__name__}:Colour", "GREEN"),
    (f"{__name__}:Colour", "__class__"),
    (f"{__name__}:Absent", "RED"),
    (f"{__name__}:Colour.RED", "RED"),
    (f"{__name__}:Opaque", "RED"),
    (f"{__name__}:os.system", "x"),
    (f"{__name__}:round_trip.<locals>.Local", "A"),
    ("os:system", "x"),
    ("no.such.module:Colour", "RED"),
    *(("", ""), (":", ""), ("__main__:", "")),
]


@pytest.mark.parametrize(
    "tree",
    [
        *({TAG: "namedtuple", "class": path, "value": items} for path, items in NAMED_TUPLES),
        *(enum_tag(path, name) for path, name in MEMBERS),
        *({TAG: tag, "value": 1} for tag in ("no such tag", 7, None, [1], "repr")),
        {TAG: "dtype", "value": "torch.none"},
        pytest.param(msgspec.msgpack.Ext(5, b"x"), id="another extension"),
    ],
    ids=str,
)
def test_a_value_that_this_process_cannot_restore_is_left_out(tree):
    assert side_state_codec.decode(saved({"a": tree, "b": 2}), PLACE) == {"b": 2}


def test_an_enum_is_left_out_unless_its_module_is_imported(tmp_path, monkeypatch):
    (tmp_path / "flashckpt_colours.py").write_text(
        "import enum\nclass Paint(enum.Enum):\n    RED = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import flashckpt_colours

    encoded = side_state_codec.encode({"e": flashckpt_colours.Paint.RED, "b": 2})
    assert side_state_codec.decode(encoded, PLACE)["e"] is flashckpt_colours.Paint.RED
    monkeypatch.delitem(sys.modules, "flashckpt_colours")
    before = set(sys.modules)
    assert side_state_codec.decode(encoded, PLACE) == {"b": 2}
    assert set(sys.modules) == before


def test_decoding_does_not_trigger_lazy_imports_of_a_module(monkeypatch):
    requested = []
    lazy = types.ModuleType("flashckpt_lazy")
    lazy.__getattr__ = lambda name: requested.append(name)
    monkeypatch.setitem(sys.modules, "flashckpt_lazy", lazy)
    tree = {"e": enum_tag("flashckpt_lazy:Colour.Inner", "RED"), "b": 2}
    assert side_state_codec.decode(saved(tree), PLACE) == {"b": 2}
    assert requested == []
