"""Side state comes back as it was, as far as it has a plain form, and cannot run anything."""

from __future__ import annotations

import argparse
import collections
import enum
import functools
import io
import os
import pathlib
import pickle
import pickletools
import random
import sys
import types
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_flashckpt.errors import CorruptCheckpointError
from megatron_flashckpt.megatron_lm import plain

PLACE = "iter_0000007/common.pt"
TAG = "__flashckpt__"


class Colour(enum.Enum):
    RED = "red"
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1


class Outer:
    class Inner(enum.Enum):
        ONE = 1


class Opaque:
    """Has no plain form."""


Pair = collections.namedtuple("Pair", "a b")


def round_trip(value):
    return plain.decode(plain.encode(value), PLACE)


def saved(tree) -> bytes:
    """Return what a hostile writer could have put there: `tree`, not tidied by `encode`."""
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    return buffer.getvalue()


atoms = (
    st.none()
    | st.booleans()
    | st.integers(-(2**130), 2**130)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.just(TAG)
    | st.binary(max_size=5)
    | st.sampled_from([*Colour, *Level, torch.bfloat16, torch.float8_e4m3fn])
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
    """Return `value` with the type of everything in it, since 1 == True == 1.0."""
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
def test_everything_with_a_plain_form_comes_back_equal_and_of_its_type(tree):
    assert typed(round_trip(tree)) == typed(tree)


def test_args_come_back_as_a_namespace():
    args = argparse.Namespace(
        tensor_model_parallel_size=2,
        params_dtype=torch.bfloat16,
        attention_backend=Colour.RED,
        level=Level.LOW,
        lr=1e-4,
        data_path=["a", "b"],
        betas=(0.9, 0.95),
        load=None,
        nested={"a": {"b": [1, None, {"c": ()}]}},
    )
    assert typed(round_trip(args)) == typed(args)
    assert isinstance(round_trip(types.SimpleNamespace(a=1)), argparse.Namespace)


@pytest.mark.parametrize("member", [Colour.RED, Colour.BLUE, Level.LOW, Outer.Inner.ONE])
def test_an_enum_comes_back_as_the_very_member(member):
    assert round_trip(member) is member
    assert round_trip({"a": [member]})["a"][0] is member


@pytest.mark.parametrize("pair", [Pair(1, 2), Pair(Pair(Colour.RED, torch.ones(2)), [Pair(0, ())])])
def test_a_named_tuple_comes_back_as_one(pair):
    restored = round_trip({"a": pair, pair[:0]: 1})["a"]
    assert type(restored) is Pair
    assert repr(restored) == repr(pair)


@pytest.mark.parametrize(
    ("path", "items"),
    [
        ("tests.megatron_lm.test_plain:Absent", [1, 2]),
        ("module_that_is_not_imported:Pair", [1, 2]),
        (f"{__name__}:Pair", [1]),
        (f"{__name__}:Opaque", [1, 2]),
        ("os:system", ["true"]),
        ("builtins:tuple", [1, 2]),
    ],
)
def test_nothing_but_a_named_tuple_that_is_there_is_made(path, items):
    made = {TAG: "namedtuple", "class": path, "items": items}
    assert plain.decode(saved({"a": made, "b": 1}), PLACE) == {"b": 1}


@pytest.mark.parametrize(
    "key",
    [
        *(Colour.RED, Pair(1, 2), (Colour.RED, 1), frozenset({Level.LOW})),
        *(b"", torch.float32, None, TAG),
    ],
)
def test_any_key_of_a_dict_comes_back(key):
    assert typed(round_trip({key: 1, "other": 2})) == typed({key: 1, "other": 2})


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
def test_an_array_comes_back_with_shape_and_type_and_can_be_written(array):
    back = round_trip({"a": array})["a"]
    assert (back.shape, back.dtype) == (array.shape, array.dtype)
    np.testing.assert_array_equal(back, array)
    assert back.flags.writeable


@pytest.mark.parametrize(
    "numbers",
    [
        tuple(range(-100, 100)),
        [2**63 - 1, -(2**63)] * 40,
        [2**63] * 100,
        [True, *range(100)],
        [1.0, *range(100)],
        (None, *range(100)),
    ],
    ids=["tuple", "list", "too large", "a bool", "a float", "none"],
)
def test_many_numbers_come_back_equal_and_of_their_types(numbers):
    found = round_trip({"x": numbers})["x"]
    assert found == numbers
    assert type(found) is type(numbers)
    assert [type(item) for item in found] == [type(item) for item in numbers]


def test_the_state_of_pythons_generator_comes_back_and_takes_few_parts():
    state = random.Random(3).getstate()
    assert round_trip(state) == state
    assert len(pickletools_of(plain.encode(state))) < 100


def pickletools_of(encoded):
    """Return the operations that a safe unpickler, written in Python, has to go through."""
    with zipfile.ZipFile(io.BytesIO(encoded)) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
        return list(pickletools.genops(archive.read(name)))


def test_the_state_of_numpys_generator_comes_back():
    before = np.random.RandomState(7)
    after = np.random.RandomState(8)
    after.set_state(round_trip(before.get_state()))
    assert before.random() == after.random()


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.bytes_(b""), b""),
        (np.complex64(1j), 1j),
    ],
)
def test_a_numpy_scalar_comes_back_as_a_plain_number(scalar, value):
    assert typed(round_trip([scalar])) == typed([value])


@pytest.mark.parametrize("contents", [b"", b"some bytes"])
def test_a_buffer_comes_back_with_its_contents_whatever_its_position(contents):
    buffer = io.BytesIO(contents)
    buffer.seek(0, io.SEEK_END)
    back = round_trip({"extra_state": buffer})["extra_state"]
    assert isinstance(back, io.BytesIO)
    assert back.read() == contents


def test_a_tensor_comes_back_on_the_cpu_without_the_rest_of_its_storage():
    whole = torch.arange(1_000_000, dtype=torch.float32, requires_grad=True)
    encoded = plain.encode({"slice": whole[10:13], "parameter": torch.nn.Parameter(torch.ones(2))})
    assert len(encoded) < 10_000
    back = plain.decode(encoded, PLACE)
    assert back["slice"].tolist() == [10.0, 11.0, 12.0]
    assert type(back["parameter"]) is torch.Tensor
    assert not back["slice"].requires_grad


def test_what_was_encoded_does_not_change_with_the_original_tensor():
    tensor = torch.zeros(2)
    tree = plain.to_plain({"t": tensor})
    tensor.fill_(7)
    assert tree["t"].tolist() == [0.0, 0.0]


def test_a_path_comes_back_as_text():
    assert round_trip(pathlib.PurePosixPath("/a/b")) == "/a/b"


def test_subclasses_of_dict_come_back_as_plain_dicts():
    ordered = collections.OrderedDict(b=1, a=collections.defaultdict(list, c=[2]))
    assert typed(round_trip(ordered)) == typed({"b": 1, "a": {"c": [2]}})


@pytest.mark.parametrize(
    "unknown",
    [
        Opaque(),
        Opaque,
        len,
        lambda: 0,
        functools.partial(int, "7"),
        sys,
        np.array([object()]),
        np.datetime64("2024-01-01"),
        np.longdouble(1),
        Pair(1, len),
        range(3),
        bytearray(b"x"),
        torch.device("cpu"),
        torch.Generator(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_plain_form_is_left_out_and_the_rest_comes_back(unknown):
    tree = {"u": unknown, "l": [1, unknown, 2], "n": argparse.Namespace(a=unknown, b=3)}
    back = round_trip(tree)
    assert typed(back) == typed({"l": [1, 2], "n": argparse.Namespace(b=3)})


def test_what_has_no_plain_form_is_left_out_of_dicts_with_odd_keys_and_of_sets():
    tree = {TAG: Opaque(), Opaque(): 1, Colour.RED: 2, "s": {Opaque, 3}}
    assert typed(round_trip(tree)) == typed({Colour.RED: 2, "s": {3}})


def test_something_without_a_plain_form_by_itself_comes_back_as_none():
    assert round_trip(Opaque()) is None


def test_what_is_left_out_is_recorded_for_people_to_read():
    tree = torch.load(io.BytesIO(plain.encode({"f": len})), weights_only=True)
    assert tree == {"f": {TAG: "repr", "value": "<built-in function len>"}}


def test_the_file_loads_with_weights_only_and_no_allow_list():
    before = torch.serialization.get_safe_globals()
    encoded = plain.encode(argparse.Namespace(dtype=torch.float16, e=Colour.RED, empty=b""))
    assert isinstance(torch.load(io.BytesIO(encoded), weights_only=True), dict)
    assert torch.serialization.get_safe_globals() == before


class Bomb:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


class Shell(Bomb):
    """Runs a shell command when it is unpickled."""

    def __reduce__(self):
        return os.system, (f"mkdir {self.path}",)


def zipped_pickle(value) -> bytes:
    """Return a file of torch's format whose pickle is of a protocol that torch does not write."""
    with zipfile.ZipFile(io.BytesIO(saved(0))) as real:
        members = {name: real.read(name) for name in real.namelist()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as forged:
        for name, contents in members.items():
            forged.writestr(name, pickle.dumps(value) if name.endswith("data.pkl") else contents)
    return buffer.getvalue()


def legacy_saved(value) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("bomb", [Bomb, Shell])
@pytest.mark.parametrize("write", [saved, legacy_saved, zipped_pickle, pickle.dumps])
@pytest.mark.parametrize("wrap", [lambda bomb: bomb, lambda bomb: {"args": [1, bomb]}])
def test_a_pickle_bomb_is_corrupt_and_does_not_go_off(tmp_path, bomb, write, wrap):
    made = tmp_path / "made"
    encoded = write(wrap(bomb(made)))
    with pytest.raises(CorruptCheckpointError, match=f"{PLACE}: side state is damaged or wants"):
        plain.decode(encoded, PLACE)
    assert not made.exists()


@pytest.mark.parametrize("make", [list, tuple, lambda pair: dict(enumerate(pair))])
def test_a_few_bytes_that_unfold_to_more_than_any_memory_are_corrupt(make):
    laughs = "ha"
    for _ in range(60):
        laughs = make([laughs, laughs])
    with pytest.raises(CorruptCheckpointError, match=PLACE):
        plain.decode(saved({"args": laughs}), PLACE)
    endless = []
    endless.append(endless)
    with pytest.raises(CorruptCheckpointError, match=PLACE):
        plain.decode(saved(endless), PLACE)


@pytest.mark.parametrize("bomb", [Bomb, Shell])
def test_the_bombs_above_are_live(tmp_path, bomb):
    torch.load(io.BytesIO(saved(bomb(tmp_path / "made"))), weights_only=False)
    assert (tmp_path / "made").is_dir()


@pytest.mark.parametrize(
    "encoded",
    [b"", b"not a checkpoint", b"PK\x03\x04", saved({"a": 1})[:-30], saved({"a": 1})[30:]],
    ids=["empty", "text", "zip magic", "cut at the end", "cut at the start"],
)
def test_broken_bytes_are_corrupt(encoded):
    with pytest.raises(CorruptCheckpointError, match=rf"(?s){PLACE}: .*--ckpt-step"):
        plain.decode(encoded, PLACE)


@pytest.mark.parametrize(
    "tree",
    [
        {TAG: "ndarray", "dtype": "O", "shape": [1], "value": b"12345678"},
        {TAG: "ndarray", "dtype": "<f4", "shape": [5], "value": b"1234"},
        {TAG: "ndarray", "dtype": "no such type", "shape": [1], "value": b"1234"},
        {TAG: "ndarray"},
        {TAG: "enum"},
        {TAG: "enum", "class": 7, "name": "x"},
        {TAG: "dict", "items": [1]},
        {TAG: "namespace", "value": [1]},
        {TAG: "set", "value": [[1]]},
        {TAG: "bytesio", "value": "text"},
        {TAG: "list", "value": b"1234567"},
        {TAG: "tuple", "value": [1]},
        {TAG: "tuple"},
    ],
)
def test_a_tagged_value_that_contradicts_itself_is_corrupt(tree):
    with pytest.raises(CorruptCheckpointError, match=PLACE):
        plain.decode(saved({"a": tree}), PLACE)


@pytest.mark.parametrize("tag", ["no such tag", 7, None, "repr"])
def test_an_unknown_tag_is_left_out(tag):
    assert plain.decode(saved({"a": {TAG: tag, "value": 1}, "b": 2}), PLACE) == {"b": 2}


def enum_tag(path: str, name: str) -> bytes:
    return saved({"e": {TAG: "enum", "class": path, "name": name}, "b": 2})


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (f"{__name__}:Colour", "GREEN"),
        (f"{__name__}:Colour", "__class__"),
        (f"{__name__}:Absent", "RED"),
        (f"{__name__}:Colour.RED", "RED"),
        (f"{__name__}:Opaque", "RED"),
        (f"{__name__}:os.system", "x"),
        ("os:system", "x"),
        ("no.such.module:Colour", "RED"),
        ("", ""),
        (":", ""),
        ("__main__:", ""),
    ],
)
def test_what_is_no_member_of_an_imported_enum_is_left_out(path, name):
    assert plain.decode(enum_tag(path, name), PLACE) == {"b": 2}


def test_an_enum_made_inside_a_function_is_left_out():
    class Local(enum.Enum):
        A = 1

    assert round_trip({"e": Local.A, "b": 2}) == {"b": 2}


def test_an_enum_of_a_module_that_is_not_imported_is_left_out_and_nothing_is_imported(
    tmp_path, monkeypatch
):
    (tmp_path / "flashckpt_colours.py").write_text(
        "import enum\nclass Paint(enum.Enum):\n    RED = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import flashckpt_colours

    encoded = plain.encode({"e": flashckpt_colours.Paint.RED, "b": 2})
    assert plain.decode(encoded, PLACE)["e"] is flashckpt_colours.Paint.RED
    monkeypatch.delitem(sys.modules, "flashckpt_colours")
    before = set(sys.modules)
    assert plain.decode(encoded, PLACE) == {"b": 2}
    assert set(sys.modules) == before


def test_a_module_that_imports_on_attribute_access_is_not_asked(monkeypatch):
    asked = []
    lazy = types.ModuleType("flashckpt_lazy")
    lazy.__getattr__ = lambda name: asked.append(name)
    monkeypatch.setitem(sys.modules, "flashckpt_lazy", lazy)
    assert plain.decode(enum_tag("flashckpt_lazy:Colour.Inner", "RED"), PLACE) == {"b": 2}
    assert asked == []
