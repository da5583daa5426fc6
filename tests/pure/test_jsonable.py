"""Plain values come back equal and of the same type, or are refused by name."""

from __future__ import annotations

import collections
import enum
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.training.jsonable import NotPlain, dumps, loads

KEYS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(), st.binary(), st.floats(allow_nan=False)
)
LEAVES = st.one_of(KEYS, st.floats(), st.complex_numbers(allow_nan=False))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(KEYS, st.just("$")), inner, max_size=4),
    ),
    max_leaves=12,
)


def same(left: Any, right: Any) -> bool:
    """Equal in value, in type and in the types of all it holds."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items()))
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, np.ndarray | np.generic):
        shapes = (left.dtype, left.shape) == (right.dtype, right.shape)
        return shapes and left.tobytes() == right.tobytes()
    if isinstance(left, float):
        return repr(left) == repr(right)
    return bool(left == right)


@given(VALUES)
def test_what_is_written_comes_back_with_its_types(value: Any) -> None:  # B49
    assert same(loads(dumps(value)), value)


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        -math.inf,
        -0.0,
        2**80,
        True,
        {1: "int", "1": "text", (1, 2): "tuple", None: "none", b"k": "bytes"},
        {"$": "tuple", "items": [1]},
        collections.OrderedDict([("b", 1), ("a", 2)]),
        collections.Counter({30: 1, 60: 2}),
        np.float32(0.1),
        np.int64(7),
        np.bool_(True),
        np.str_("text"),
        np.datetime64("2024-01-02"),
        np.arange(6, dtype=np.int16).reshape(2, 3).T,
        np.zeros((0, 3)),
        np.array(3.0),
        np.array(["a", "bcd"]),
    ],
    ids=repr,
)
def test_values_that_json_alone_would_change(value: Any) -> None:
    assert same(loads(dumps(value)), value)


def test_a_restored_array_can_be_changed() -> None:
    array = loads(dumps(np.ones(3)))
    array[0] = 5
    assert array[0] == 5


def test_the_text_is_strict_json() -> None:
    json.loads(dumps([math.nan, math.inf, "\ud800"]), parse_constant=pytest.fail)


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    pass


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, {"b": object()}]}, "state.a[1].b"),
        ({"a": (0, {3: {4}})}, "state.a[1][3]"),
        ([Colour.RED], "state[0]"),
        ({"t": Text("t")}, "state.t"),
        ({"o": np.array([object()])}, "state.o"),
        ({(1, Text("t")): 0}, "state key (1, 't')[1]"),
    ],
)
def test_anything_else_is_refused_by_its_path(value: Any, path: str) -> None:
    with pytest.raises(NotPlain) as caught:
        dumps(value, "state")
    assert caught.value.path == path
    assert str(caught.value).startswith(path)


DAMAGED = [
    "",
    "{",
    '{"$": "pickle"}',
    '{"$": "tuple"}',
    '{"$": "bytes", "value": "?"}',
    '{"$": []}',
]


@pytest.mark.parametrize("text", DAMAGED)
def test_damaged_text_is_a_value_error(text: str) -> None:  # B24
    with pytest.raises(ValueError, match=r"."):
        loads(text)
