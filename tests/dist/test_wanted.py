"""Parts of saved tensors: read to their place, whatever their type, layout and origin."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo

from elastic.storage.chunk_digests import ChunkDigester
from elastic.storage.filesystem import Filesystem
from elastic.storage.verified_file import VerifiedFile
from elastic.training import wanted as module
from elastic.training.tensor_head import tensor_head
from elastic.training.wanted import Wanted, fill, narrow, shared_out

DTYPES = [
    torch.bfloat16,
    torch.bool,
    torch.complex64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int8,
    torch.int64,
    torch.uint8,
    torch.uint16,
]
SHAPES: list[tuple[int, ...]] = [(), (1,), (7,), (4, 6), (3, 1, 5), (2, 3, 4, 5)]


def values(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(size)
    upper = 2 if dtype == torch.bool else 100
    flat = torch.randint(0, upper, (size,), dtype=torch.uint8, generator=generator)
    return flat.view(dtype).view(tuple(shape))


class Saved:
    """Tensors in one file, one behind the other, as DCP lays them down, or their values alone."""

    def __init__(
        self, folder: Path, tensors: Sequence[torch.Tensor], *, is_raw: bool = False
    ) -> None:
        self.is_raw = is_raw
        self.fs = Filesystem.at(str(folder))
        self.tensors = tensors
        self.infos = []
        data = bytearray()
        for tensor in tensors:
            record = io.BytesIO()
            if is_raw:
                record.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            else:
                torch.save(tensor, record)
            self.infos.append(_StorageInfo("shard", len(data), len(record.getvalue())))
            data += record.getvalue()
        self.fs.write_bytes("a/shard", bytes(data))
        digester = ChunkDigester(1000)
        digester.update(data)
        self.file = digester.file("shard")

    def wanted(
        self,
        number: int,
        offsets: Sequence[int],
        lengths: Sequence[int],
        target: torch.Tensor,
    ) -> Wanted:
        tensor = self.tensors[number]
        return Wanted(
            info=self.infos[number],
            shape=tensor.shape,
            dtype=tensor.dtype,
            offsets=offsets,
            lengths=lengths,
            target=target,
            is_raw=self.is_raw,
        )

    def fill(self, wanted: Sequence[Wanted]) -> None:
        with VerifiedFile(self.fs, "a", self.file) as opened:
            fill(opened, wanted)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    def data(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    return one.dtype == other.dtype and torch.equal(data(one), data(other))


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[Wanted]:
    """Those that were made by torch.load."""
    found: list[Wanted] = []
    real = module._loaded
    monkeypatch.setattr(
        module, "_loaded", lambda file, wanted: (found.append(wanted), real(file, wanted))[1]
    )
    return found


def halves(shape: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The whole, and of each dimension the first and the second half."""
    found = [([0] * len(shape), list(shape))]
    for dim, size in enumerate(shape):
        for start, stop in ((0, size // 2), (size // 2, size)):
            offsets, lengths = [0] * len(shape), list(shape)
            offsets[dim], lengths[dim] = start, stop - start
            found.append((offsets, lengths))
    return found


@pytest.mark.parametrize("is_raw", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_part_of_every_tensor(
    tmp_path: Path, slow: list[Wanted], dtype: torch.dtype, is_raw: bool
) -> None:
    saved = Saved(tmp_path, [values(shape, dtype) for shape in SHAPES], is_raw=is_raw)
    for number, tensor in enumerate(saved.tensors):
        for offsets, lengths in halves(tensor.shape):
            target = torch.zeros(lengths, dtype=dtype)
            saved.fill([saved.wanted(number, offsets, lengths, target)])
            assert same(target, narrow(tensor, offsets, lengths)), (number, offsets, lengths)
    assert slow == [], "what our torch has saved needs no torch.load"
    targets = [torch.zeros_like(tensor) for tensor in saved.tensors]
    saved.fill([saved.wanted(n, [0] * t.dim(), t.shape, t) for n, t in enumerate(targets)])
    assert all(map(same, targets, saved.tensors))


@pytest.mark.parametrize("is_raw", [False, True])
def test_targets_of_another_type_or_layout(
    tmp_path: Path, slow: list[Wanted], is_raw: bool
) -> None:
    tensor = values((4, 6), torch.float32)
    saved = Saved(tmp_path, [values((7,), torch.uint8), tensor], is_raw=is_raw)
    double, turned = torch.zeros(2, 6, dtype=torch.float64), torch.zeros(6, 4).t()
    part = torch.zeros(9, 9)[2:6, 1:7]
    saved.fill([saved.wanted(1, [1, 0], [2, 6], double)])
    saved.fill([saved.wanted(1, [0, 0], [4, 6], turned)])
    saved.fill([saved.wanted(1, [0, 0], [4, 6], part)])
    assert torch.equal(double, tensor[1:3].double())
    assert torch.equal(turned, tensor)
    assert torch.equal(part, tensor)
    assert slow == []


def test_what_lies_otherwise_in_its_record_goes_by_way_of_torch(
    tmp_path: Path, slow: list[Wanted]
) -> None:
    plain = values((4, 6), torch.float32)
    # Turned, a view of something larger, a parameter, and with nothing in it.
    odd = [plain.t(), plain[1:3, 2:5], torch.nn.Parameter(plain), torch.zeros(0, 5)]
    saved = Saved(tmp_path, [plain, *odd])
    targets = [torch.zeros(tensor.shape) for tensor in saved.tensors]
    saved.fill([saved.wanted(n, [0] * t.dim(), t.shape, t) for n, t in enumerate(targets)])
    assert all(map(same, targets, saved.tensors))
    assert len(slow) == 3


def test_little_memory_of_its_own_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [values((4, 6), torch.float32) for _ in range(9)]
    saved = Saved(tmp_path, tensors)
    monkeypatch.setattr(module, "_BATCH_BYTES", 200)
    made: list[int] = []
    real = module._Reading.make_room
    monkeypatch.setattr(
        module._Reading, "make_room", lambda self: (made.append(self.own_bytes), real(self))[1]
    )
    reads: list[int] = []
    monkeypatch.setattr(
        VerifiedFile,
        "read",
        lambda self, wanted, read=VerifiedFile.read: (reads.append(sum(made)), read(self, wanted)),
    )
    targets = [torch.zeros(4, 6, dtype=torch.float64) for _ in tensors]
    saved.fill([saved.wanted(n, [0, 0], [4, 6], t) for n, t in enumerate(targets)])
    assert all(map(torch.equal, targets, [tensor.double() for tensor in tensors]))
    assert [late - early for early, late in zip([0, *reads], reads, strict=False)] == [192] * 4 + [
        96
    ]


def test_shares_are_runs_of_about_equal_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def one(name: str, start: int, length: int) -> Wanted:
        return Wanted(
            info=_StorageInfo(name, start, length),
            shape=torch.Size([1]),
            dtype=torch.float32,
            offsets=[0],
            lengths=[1],
            target=torch.zeros(1),
        )

    wanted = [one("b", 100 * n, 100) for n in range(4)] + [one("a", 0, 400)]
    assert shared_out(wanted, 2) == [sorted(wanted, key=lambda w: w.info.relative_path)]
    monkeypatch.setattr(module, "_SHARE_BYTES", 50)
    places = [
        [(w.info.relative_path, w.info.offset) for w in share] for share in shared_out(wanted, 2)
    ]
    assert places == [[("a", 0)], [("b", 0), ("b", 100), ("b", 200), ("b", 300)]]
    assert shared_out([], 4) == []


def test_a_head_ends_where_the_values_begin() -> None:
    tensor = values((4, 6), torch.float32)
    record = io.BytesIO()
    torch.save(tensor, record)
    head = tensor_head(tensor.shape, tensor.dtype)
    assert record.getvalue().startswith(head + tensor.numpy().tobytes())
