"""Tensor files: the two formats that others read, written in one pass, one tensor at a time.

torch's own writer would hold every tensor at once, and ends the whole process when the disk is
full. Knows nothing of checkpoints. Must not import ray.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import torch

__all__ = [
    "Stored",
    "check_torch",
    "stored_in",
    "total_bytes",
    "write_safetensors",
    "write_torch",
]

_SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

_ALIGNMENT_BYTES = 64  # torch's own: a mapped tensor then starts where its dtype may start
_FROM_HERE_ZIP64 = 2**31


@dataclass(frozen=True)
class Stored:
    """A tensor that is still on storage under `name`; whoever reads it gives it `dtype`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Read = Callable[[Stored], torch.Tensor]


# --- torch ---------------------------------------------------------------------------------------


def write_torch(file: BinaryIO, tree: Any, read: Read) -> None:
    """Writes what `torch.save(tree, file)` would, were each `Stored` in it the tensor itself.

    Those of one name share their memory when loaded. `torch.load` takes it with
    `weights_only=True` and with `mmap=True`.
    """
    keys: dict[Stored, str] = {}
    with _Archive(_Unseekable(file), "w", zipfile.ZIP_STORED) as archive:  # type: ignore[call-overload]
        _add(archive, file, "version", b"3\n")
        _add(archive, file, "byteorder", sys.byteorder.encode())
        _add(archive, file, "data.pkl", _pickled(tree, keys))
        for stored, key in keys.items():
            _add(archive, file, f"data/{key}", _bytes_of(stored, read))


def check_torch(file: BinaryIO) -> None:
    """Loads what was written to `file`, a file with a name, as a careful reader would.

    Raises `pickle.UnpicklingError` if it does not load.
    """
    file.flush()
    torch.load(os.fspath(file.name), map_location="cpu", mmap=True, weights_only=True)


def stored_in(tree: Any) -> Iterator[Stored]:
    """Every `Stored` in it."""
    if isinstance(tree, Stored):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from stored_in(item)


class _Archive(zipfile.ZipFile):
    """Is finished at the end of its block, and left as it is where that was broken off.

    zipfile would finish it then too, where its entry is not at its end, or the file closed by now.
    """

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()

    def __del__(self) -> None:
        pass


class _Unseekable:
    """Makes zipfile write sizes and checksums behind each entry, as torch does."""

    def __init__(self, file: BinaryIO) -> None:
        self.write = file.write
        self.flush = file.flush


def _add(archive: zipfile.ZipFile, file: BinaryIO, name: str, data: bytes | memoryview) -> None:
    entry = zipfile.ZipInfo(f"archive/{name}")
    num_bytes = memoryview(data).nbytes
    zip64 = num_bytes >= _FROM_HERE_ZIP64
    # 30 bytes of header, the name, 4 bytes before the padding, and 20 of sizes in a large one.
    start = file.tell() + 30 + len(entry.filename) + 4 + 20 * zip64
    padding = -start % _ALIGNMENT_BYTES
    entry.extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
    with archive.open(entry, "w", force_zip64=zip64) as stream:
        stream.write(data)
    entry.extra = b""


def _pickled(tree: Any, keys: dict[Stored, str]) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, keys).dump(tree)
    return buffer.getvalue()


@dataclass(frozen=True)
class _Storage:
    """Memory of a tensor, pickled by reference to the entry that holds it."""

    kind: type
    key: str
    num_items: int


class _Pickler(pickle.Pickler):
    """Pickles `Stored` as torch pickles tensors: `torch._utils` knows how to put them together."""

    def __init__(self, buffer: io.BytesIO, keys: dict[Stored, str]) -> None:
        super().__init__(buffer, protocol=2)
        self._keys = keys

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return ("storage", obj.kind, obj.key, "cpu", obj.num_items)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Stored):
            return NotImplemented
        key = self._keys.setdefault(obj, str(len(self._keys)))
        place: tuple[Any, ...] = (0, obj.shape, _strides(obj.shape), False, OrderedDict())
        kinds = torch.storage._dtype_to_storage_type_map()
        if obj.dtype in kinds:
            kind = getattr(torch, kinds[obj.dtype])
            storage = _Storage(kind, key, math.prod(obj.shape))
            return torch._utils._rebuild_tensor_v2, (storage, *place)
        untyped = _Storage(torch.UntypedStorage, key, obj.bytes)
        return torch._utils._rebuild_tensor_v3, (untyped, *place, obj.dtype)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for num_items in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(1, num_items))
    return tuple(strides) if shape else ()


# --- safetensors ---------------------------------------------------------------------------------


def write_safetensors(
    file: BinaryIO, tensors: Mapping[str, Stored], metadata: Mapping[str, str], read: Read
) -> None:
    """Writes the tensors by name: a header in JSON, then their bytes, in the order of the header.

    Format: https://huggingface.co/docs/safetensors. Raises `ValueError` for a dtype that it lacks.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    # The widest first keeps each tensor aligned to its own dtype.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    end = 0
    for name, stored in ordered:
        if stored.dtype not in _SAFETENSORS_DTYPES:
            raise ValueError(f"safetensors has no dtype for {name!r}, {stored.dtype}: use torch")
        start, end = end, end + stored.bytes
        header[name] = {
            "dtype": _SAFETENSORS_DTYPES[stored.dtype],
            "shape": list(stored.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)))
    file.write(text)
    for _, stored in ordered:
        file.write(_bytes_of(stored, read))


def total_bytes(tensors: Iterable[Stored]) -> int:
    """Bytes of the tensors, each counted once, without what a format adds."""
    return sum(stored.bytes for stored in set(tensors))


def _bytes_of(stored: Stored, read: Read) -> memoryview:
    tensor = read(stored).contiguous()
    assert (tuple(tensor.shape), tensor.dtype) == (stored.shape, stored.dtype), stored
    return memoryview(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))
