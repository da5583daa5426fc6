"""Plain values as JSON text and back, with their types: what a checkpoint's plain state may hold.

Every value that is written comes back equal and of the same type; what cannot is refused by its
path, so that nothing in a checkpoint has to be pickled. Must not import ray or torch.
"""

from __future__ import annotations

import base64
import collections
import json
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

__all__ = ["NotPlain", "dumps", "loads"]

_TAG = "$"
_DTYPE_KINDS = "biufcSUMm"
_ATOMS = (bool, int, str, type(None))
_MAPPINGS: dict[type, str] = {
    dict: "dict",
    collections.OrderedDict: "ordered_dict",
    collections.Counter: "counter",
}


class NotPlain(ValueError):
    """A value that has no JSON form here. `path` says where it was."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path = path
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.path or 'the value'}: {self.problem}"


def dumps(value: object, path: str = "") -> str:
    """ASCII JSON text from which `loads` makes an equal value of the same types.

    Accepts None, bool, int, float (nan and infinities too), complex, str, bytes, list, tuple, dict
    (keys of any of these hashable types), OrderedDict, Counter, numpy scalars and arrays of
    numbers, text and dates. Raises `NotPlain` naming `path` and the place below it for anything
    else, subclasses included.
    """
    return json.dumps(_encode(value, path), allow_nan=False, separators=(",", ":"))


def loads(text: str | bytes) -> Any:
    """The value that `dumps` was given. Raises `ValueError` when the text is not of its making."""
    try:
        return _decode(json.loads(text))
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"not the text of a plain value: {reason}") from error


def _encode(value: Any, path: str) -> Any:
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is float:
        return value if math.isfinite(value) else {_TAG: "float", "value": repr(value)}
    if kind is list:
        return _encode_items(value, path)
    if kind is tuple:
        return {_TAG: "tuple", "items": _encode_items(value, path)}
    if kind in _MAPPINGS:
        return _encode_mapping(value, _MAPPINGS[kind], path)
    if kind is bytes:
        return {_TAG: "bytes", "value": _base64(value)}
    if kind is complex:
        return {_TAG: "complex", "value": [repr(value.real), repr(value.imag)]}
    if isinstance(value, np.generic) or kind is np.ndarray:
        return _encode_numpy(value, path)
    raise NotPlain(
        path,
        f"a {kind.__module__}.{kind.__qualname__} cannot be kept; expected a number, text, bytes, "
        "None, a numpy value, or a list, tuple or dict of them. Turn it into one of these in "
        "state_dict(), or leave it out",
    )


def _encode_items(items: Iterable[Any], path: str) -> list[Any]:
    return [_encode(item, f"{path}[{index}]") for index, item in enumerate(items)]


def _encode_mapping(mapping: dict[Any, Any], kind: str, path: str) -> Any:
    if kind == "dict" and _TAG not in mapping and all(type(key) is str for key in mapping):
        return {key: _encode(item, _below(path, key)) for key, item in mapping.items()}
    pairs = [
        [_encode(key, f"{path} key {key!r}"), _encode(item, _below(path, key))]
        for key, item in mapping.items()
    ]
    return {_TAG: kind, "items": pairs}


def _encode_numpy(value: np.generic | np.ndarray[Any, Any], path: str) -> Any:
    if value.dtype.kind not in _DTYPE_KINDS or value.dtype.fields is not None:
        raise NotPlain(
            path,
            f"numpy values of dtype {value.dtype} cannot be kept; expected numbers, text or dates",
        )
    encoded = {"dtype": value.dtype.str, "value": _base64(value.tobytes())}
    if isinstance(value, np.ndarray):
        return {_TAG: "array", "shape": list(value.shape), **encoded}
    return {_TAG: "scalar", **encoded}


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _decode(item) for key, item in value.items()}
    decoder = _DECODERS.get(value[_TAG])
    if decoder is None:
        raise ValueError(
            f"unknown kind {value[_TAG]!r} of plain value: written by a newer version, or damaged"
        )
    return decoder(value)


def _decode_pairs(value: dict[str, Any]) -> dict[Any, Any]:
    return {_decode(key): _decode(item) for key, item in value["items"]}


def _decode_array(value: dict[str, Any]) -> np.ndarray[Any, Any]:
    # frombuffer gives a read-only array; the copy is one that its owner may change.
    flat = np.frombuffer(_unbase64(value["value"]), dtype=np.dtype(value["dtype"]))
    return flat.reshape(value["shape"]).copy()


def _decode_scalar(value: dict[str, Any]) -> Any:
    dtype = np.dtype(value["dtype"])
    if dtype.itemsize == 0:
        return dtype.type()
    return np.frombuffer(_unbase64(value["value"]), dtype=dtype)[0]


_DECODERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "float": lambda value: float(value["value"]),
    "complex": lambda value: complex(float(value["value"][0]), float(value["value"][1])),
    "bytes": lambda value: _unbase64(value["value"]),
    "tuple": lambda value: tuple(_decode(item) for item in value["items"]),
    "dict": _decode_pairs,
    "ordered_dict": lambda value: collections.OrderedDict(_decode_pairs(value)),
    "counter": lambda value: collections.Counter(_decode_pairs(value)),
    "array": _decode_array,
    "scalar": _decode_scalar,
}


def _below(path: str, key: object) -> str:
    if type(key) is not str:
        return f"{path}[{key!r}]"
    return f"{path}.{key}" if path else key


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _unbase64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
