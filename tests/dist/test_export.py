"""Export: the file is what the model is, appears whole or not at all, and disturbs no training."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

from elastic.cli import main
from elastic.storage.checkpoints import Catalog
from elastic.storage.filesystem import Filesystem
from elastic.storage.run_file import load_run_file
from elastic.training import export as export_module
from elastic.training import tensor_file
from elastic.training.checkpoint import CheckpointCorrupt
from elastic.training.export import Exported, NothingYet, Request, answer, export
from elastic.training.held_checkpoint import CheckpointGone, HeldCheckpoint
from elastic.training.state import TrackedState
from elastic.training.tensor_file import Stored, write_safetensors, write_torch
from elastic.verbs.export import EXPORTER_ENVIRONMENT
from tests.damage import damage
from tests.dist import small_run, standalone_run
from tests.dist.processes import run_ranks
from tests.dist.standalone_run import Recipe
from tests.made_run import fingerprint

torch.set_num_threads(1)
STEP = 1
INPUTS = torch.linspace(-1, 1, 20).reshape(5, 4)


def committed(root: Path, tracked: TrackedState, run_id: str = "run") -> Catalog:
    """A checkpoint of the tracked objects at step 1 of the run in `root`; each rank calls it."""
    catalog = Catalog(Filesystem.at(str(root)), run_id)
    path = catalog.attempt_path(STEP, 0, 1)
    manifest = small_run.save(root, path, tracked)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        catalog.commit(replace(manifest, run_id=run_id), path)
    return catalog


def _train(rank: int, world_size: int, root: str) -> dict[str, Any]:
    model = small_run.small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    small_run.train(model, optimizer, range(3))
    tracked = TrackedState(model=model, optimizer=optimizer, counter={"calls": 3})
    committed(Path(root), tracked)
    with torch.no_grad():
        logits = model(INPUTS)
    model.seen -= 1  # the forward above
    more = small_run.train(model, optimizer, range(3, 6))
    return {"logits": logits.tolist(), "more": more}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of two ranks, and what its live model said."""
    root = tmp_path_factory.mktemp("trained") / "run"
    return root, run_ranks(_train, 2, str(root))[0]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run with its run file, ledger, metrics and checkpoints at 0, 4 and 8."""
    root = tmp_path_factory.mktemp("whole") / "small"
    standalone_run.run(2, Recipe(root=str(root), until=8, save_every=4))
    return root


def asked(root: Path, out: Path, **changes: Any) -> Request:
    form = "safetensors" if out.suffix == ".safetensors" else "torch"
    return Request(url=str(root), run_id="run", out=str(out), format=form, **changes)


def loaded(path: Path, **options: Any) -> Any:
    return torch.load(path, weights_only=True, **options)


def saved(tmp_path: Path, **objects: Any) -> Path:
    root = tmp_path / "run"
    committed(root, TrackedState(**objects))
    return root


# --- the file is the model -----------------------------------------------------------------------


@pytest.mark.parametrize("mapped", [False, True])
def test_the_file_gives_the_logits_of_the_live_model(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path, mapped: bool
) -> None:
    root, live = trained
    out = tmp_path / "model.pt"
    done = export(asked(root, out))
    assert (done.step, done.num_tensors, done.warnings) == (STEP, 13, [])
    assert done.bytes == out.stat().st_size
    model = small_run.Small()
    model.load_state_dict(loaded(out, mmap=mapped))
    assert model(INPUTS).tolist() == live["logits"]
    assert os.listdir(tmp_path) == ["model.pt"]


def test_safetensors_gives_the_logits_of_the_live_model(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    root, live = trained
    out = tmp_path / "model.safetensors"
    export(asked(root, out))
    model = small_run.Small()
    model.load_state_dict(load_file(out))
    assert model(INPUTS).tolist() == live["logits"]
    with safe_open(out, "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "1"}


def test_training_can_go_on_from_an_export_with_optimizer(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    root, live = trained
    out = tmp_path / "all.pt"
    export(asked(root, out, with_optimizer=True))
    whole = loaded(out)
    assert sorted(whole) == ["model", "optimizer"]
    model = small_run.Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=7.0)
    model.load_state_dict(whole["model"])
    optimizer.load_state_dict(whole["optimizer"])
    more = small_run.train(model, optimizer, range(3, 6))
    assert more == pytest.approx(live["more"], rel=1e-5)


class Paced(torch.optim.SGD):
    pace = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "pace": self.pace}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.pace = state_dict.pop("pace")
        super().load_state_dict(state_dict)


def test_an_export_with_optimizer_holds_what_that_keeps_for_itself(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Paced]:
        model = nn.Linear(2, 2)
        groups = [{"params": [parameter]} for parameter in model.parameters()]
        return model, Paced(groups, lr=0.1, momentum=0.9)

    model, optimizer = build()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.pace = 3
    del optimizer.param_groups[1]  # of which the state is still there
    root = saved(tmp_path, model=model, optimizer=optimizer)
    export(asked(root, tmp_path / "all.pt", with_optimizer=True))
    other = Paced([build()[0].weight], lr=0.1, momentum=0.9)
    other.load_state_dict(loaded(tmp_path / "all.pt")["optimizer"])
    assert other.pace == 3
    assert len(other.state) == 1


def test_safetensors_with_optimizer_holds_its_tensors(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    flat, whole = tmp_path / "all.safetensors", tmp_path / "all.pt"
    for out in (flat, whole):
        export(asked(trained[0], out, with_optimizer=True))
    tensors, state = load_file(flat), loaded(whole)["optimizer"]
    names = state["param_groups"][0]["param_names"]
    for number, values in state["state"].items():
        for key, value in values.items():
            assert torch.equal(tensors.pop(f"optimizer.{names[number]}.{key}"), value)
    assert sorted(tensors) == sorted(small_run.Small().state_dict())


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_floating_point_tensors_take_the_dtype_that_is_asked_for(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path, suffix: str
) -> None:
    load = loaded if suffix == "pt" else load_file
    export(asked(trained[0], tmp_path / f"a.{suffix}"))
    done = export(asked(trained[0], tmp_path / f"b.{suffix}", dtype="bfloat16"))
    assert done.dtypes == {"bfloat16": 12, "int64": 1}
    as_saved, narrow = load(tmp_path / f"a.{suffix}"), load(tmp_path / f"b.{suffix}")
    for name, tensor in as_saved.items():
        expected = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert torch.equal(narrow[name], expected), name


def test_values_beyond_the_range_of_a_dtype_are_told(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, 1e9)
    done = export(asked(saved(tmp_path, model=model), tmp_path / "m.pt", dtype="float16"))
    assert done.warnings == ["model.weight has infinities as torch.float16"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_parameters_stay_tied(tmp_path: Path) -> None:
    model = Tied()
    root = saved(tmp_path, model=model)
    assert export(asked(root, tmp_path / "m.pt")).num_tensors == 1
    state = loaded(tmp_path / "m.pt")
    assert list(state) == list(model.state_dict())
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
    export(asked(root, tmp_path / "m.safetensors"))
    again = Tied()
    load_model(again, tmp_path / "m.safetensors")
    assert torch.equal(again.head.weight, model.head.weight)


class WithExtra(nn.Linear):
    def __init__(self, value: Any) -> None:
        super().__init__(2, 2)
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


def test_extra_state_is_in_a_torch_file_and_its_absence_is_told(tmp_path: Path) -> None:
    value = {"scale": torch.arange(3.0), "names": ["a", ("b", None)], "bytes": b"\xff", "z": 1j}
    root = saved(tmp_path, model=WithExtra(value))
    assert export(asked(root, tmp_path / "m.pt")).warnings == []
    again = WithExtra(None)
    again.load_state_dict(loaded(tmp_path / "m.pt"))
    assert torch.equal(again.value.pop("scale"), value.pop("scale"))
    assert again.value == value
    (warning,) = export(asked(root, tmp_path / "m.safetensors")).warnings
    assert "_extra_state: safetensors holds tensors only" in warning
    assert sorted(load_file(tmp_path / "m.safetensors")) == ["bias", "weight"]


def test_another_tracked_module_goes_by_its_name(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    ema = torch.optim.swa_utils.AveragedModel(model)
    root = saved(tmp_path, net=model, ema=ema, optimizer=torch.optim.SGD(model.parameters()))
    export(asked(root, tmp_path / "m.pt", tracked="ema"))
    again = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
    again.load_state_dict(loaded(tmp_path / "m.pt"))
    assert torch.equal(again.module.weight, model.weight)
    with pytest.raises(ValueError, match="no module as 'model'; it tracks the modules ema, net"):
        export(asked(root, tmp_path / "m.pt"))
    with pytest.raises(ValueError, match="no module as 'optimizer'"):
        export(asked(root, tmp_path / "m.pt", tracked="optimizer"))


# --- the formats by themselves -------------------------------------------------------------------

TENSORS: dict[str, torch.Tensor] = {
    "f64": torch.randn(3, 5, dtype=torch.float64),
    "f32": torch.randn(2, 3, 4),
    "bf16": torch.randn(7).bfloat16(),
    "f16": torch.randn(1).half(),
    "f8": torch.randn(5).to(torch.float8_e4m3fn),
    "i64": torch.arange(5),
    "i16": torch.arange(3, dtype=torch.int16),
    "u8": torch.arange(9, dtype=torch.uint8),
    "u16": torch.arange(9).to(torch.uint16),
    "bool": torch.tensor([True, False, True]),
    "zero-dim": torch.tensor(2.5),
    "empty": torch.empty(2, 0, 3),
    "größe [*] %20": torch.ones(1),
}


def stored(tensors: dict[str, torch.Tensor]) -> dict[str, Stored]:
    return {name: Stored(name, tuple(one.shape), one.dtype) for name, one in tensors.items()}


def written(path: Path, tree: Any, tensors: dict[str, torch.Tensor]) -> Path:
    with open(path, "wb") as file:
        write_torch(file, tree, lambda wanted: tensors[wanted.name])
    return path


@pytest.mark.parametrize("zip64_from", [2**31, 0])
def test_a_torch_file_is_one_as_torch_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zip64_from: int
) -> None:
    monkeypatch.setattr(tensor_file, "_FROM_HERE_ZIP64", zip64_from)
    tree = {"model": stored(TENSORS), "plain": [1, ("a", 2.5), {"b": None}, OrderedDict(c=True)]}
    ours = written(tmp_path / "ours.pt", tree, TENSORS)
    torch.save({**tree, "model": TENSORS}, tmp_path / "theirs.pt")
    with zipfile.ZipFile(ours) as archive, zipfile.ZipFile(tmp_path / "theirs.pt") as theirs:
        assert archive.testzip() is None
        assert archive.read("archive/data.pkl") == theirs.read("theirs/data.pkl")
    for mapped in (False, True):
        found = loaded(ours, mmap=mapped)
        assert found["plain"] == tree["plain"]
        for name, tensor in TENSORS.items():
            same = found["model"][name].view(torch.uint8) if tensor.ndim else found["model"][name]
            assert torch.equal(same, tensor.view(torch.uint8) if tensor.ndim else tensor), name
            assert (found["model"][name].dtype, found["model"][name].stride()) == (
                tensor.dtype,
                tensor.stride(),
            )


def test_mapped_tensors_are_aligned(tmp_path: Path) -> None:
    found = loaded(written(tmp_path / "m.pt", stored(TENSORS), TENSORS), mmap=True)
    assert not [name for name, tensor in found.items() if tensor.data_ptr() % 64]


def test_a_safetensors_file_holds_every_dtype(tmp_path: Path) -> None:
    with open(tmp_path / "m.safetensors", "wb") as file:
        write_safetensors(file, stored(TENSORS), {}, lambda wanted: TENSORS[wanted.name])
    found = load_file(tmp_path / "m.safetensors")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name].float(), tensor.float()), name


def test_what_safetensors_cannot_hold_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex128))

    root = saved(tmp_path, model=Complex())
    with pytest.raises(ValueError, match=r"no dtype for 'phase', torch\.complex128: use torch"):
        export(asked(root, tmp_path / "m.safetensors"))
    export(asked(root, tmp_path / "m.pt"))
    assert loaded(tmp_path / "m.pt")["phase"].dtype == torch.complex128


# --- memory --------------------------------------------------------------------------------------

_MEASURE = """
import json, sys
from elastic.training.export import Request, export
fields = json.loads(sys.argv[1])
def status(name):
    for line in open("/proc/self/status"):
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
export(Request(**{**fields, "url": sys.argv[2], "out": fields["out"] + ".warm"}))
base = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
export(Request(**fields))
print(json.dumps([base, status("VmHWM") - base]))
"""
_LARGEST = 20_000_000


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint of 200 MB in ten tensors, and a tiny one of the same shape to warm up with."""
    roots = []
    for size in (_LARGEST // 4, 8):
        root = tmp_path_factory.mktemp("large") / "run"
        model = nn.ParameterDict({f"p{i}": torch.full((size // 4, 4), i / 4) for i in range(10)})
        committed(root, TrackedState(model=model))
        roots.append(root)
    return roots[0], roots[1]


@pytest.mark.parametrize(
    ("suffix", "dtype", "largest"),
    [
        ("pt", None, _LARGEST),
        ("safetensors", "bfloat16", _LARGEST),
        ("pt", "float64", 2 * _LARGEST),
    ],
)
def test_memory_is_bounded_by_the_largest_tensor(
    large: tuple[Path, Path], tmp_path: Path, suffix: str, dtype: str | None, largest: int
) -> None:
    out = tmp_path / f"m.{suffix}"
    fields = vars(asked(large[0], out, dtype=dtype))
    measured = subprocess.run(
        [sys.executable, "-c", _MEASURE, json.dumps(fields), str(large[1])],
        env={**os.environ, **EXPORTER_ENVIRONMENT, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert measured.returncode == 0, measured.stderr
    base, above = json.loads(measured.stdout)
    print(f"{suffix} {dtype}: base {base / 1e6:.0f} MB, above it {above / 1e6:.1f} MB")
    assert above <= 2 * largest + 4_000_000
    assert out.stat().st_size >= 100_000_000


# --- beside the run ------------------------------------------------------------------------------


def test_exports_while_a_run_trains_and_saves_disturb_nothing(tmp_path: Path) -> None:  # B94
    """With keep=1 retention takes each checkpoint away while it is being exported."""
    undisturbed, disturbed = (
        Recipe(root=str(tmp_path / name), until=40, save_every=2, keep=1, slow_write_s=0.02)
        for name in ("undisturbed", "disturbed")
    )
    standalone_run.run(2, undisturbed)
    trainer = threading.Thread(target=standalone_run.run, args=(2, disturbed))
    trainer.start()
    steps, outcomes = set(), []
    while trainer.is_alive():
        run_file = None
        if (tmp_path / "disturbed" / "run.json").exists():
            run_file = load_run_file(Filesystem.at(disturbed.root))
        if run_file is None:
            time.sleep(0.02)
            continue
        out = tmp_path / "model.pt"
        request = replace(asked(Path(disturbed.root), out), run_id=run_file.run_id)
        try:
            steps.add(export(request).step)
        except NothingYet:
            outcomes.append("none yet")
            continue
        assert sorted(loaded(out)) == ["0.bias", "0.weight", "2.weight"]
        outcomes.append("exported")
    trainer.join()
    print(f"{outcomes.count('exported')} exports of {len(steps)} steps")
    assert len(steps) >= 3
    assert standalone_run.curve(disturbed.root) == standalone_run.curve(undisturbed.root)


def _then(monkeypatch: pytest.MonkeyPatch, work: Any) -> None:
    """After the digests have been checked, and before the first tensor is read, `work` is done."""
    verify = HeldCheckpoint.verify

    def and_then(self: HeldCheckpoint, *arguments: Any) -> None:
        verify(self, *arguments)
        work()

    monkeypatch.setattr(HeldCheckpoint, "verify", and_then)


def test_a_checkpoint_that_retention_removes_meanwhile_is_exported_whole(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    shutil.copytree(trained[0], root)
    catalog = Catalog(Filesystem.at(str(root)), "run")
    _then(monkeypatch, lambda: catalog.remove(STEP))
    export(asked(root, tmp_path / "m.pt"))
    assert catalog.complete_steps() == []
    model = small_run.Small()
    model.load_state_dict(loaded(tmp_path / "m.pt"))
    assert model(INPUTS).tolist() == trained[1]["logits"]


def test_on_an_object_store_one_that_is_removed_meanwhile_is_told(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, remote = Filesystem.at(str(trained[0])), Filesystem.at(f"memory://{tmp_path.name}")
    here, there = Catalog(local, "run"), Catalog(remote, "run")
    manifest = replace(here.manifest(STEP), attempt=2)
    path = there.begin(STEP, 0, 2)
    for file in manifest.files:
        remote.write_bytes(
            f"{path}/{file.path}", local.read_bytes(f"{here.data_path(STEP)}/{file.path}")
        )
    there.commit(manifest, path)
    request = replace(asked(trained[0], tmp_path / "m.pt"), url=remote.url)
    assert export(request).step == STEP
    before = (tmp_path / "m.pt").read_bytes()
    _then(monkeypatch, lambda: there.remove(STEP))
    with pytest.raises(CheckpointGone, match=r"was removed or replaced.*checkpoints pin"):
        export(replace(request, step=STEP))
    assert (tmp_path / "m.pt").read_bytes() == before
    assert os.listdir(tmp_path) == ["m.pt"]


# --- nothing or all ------------------------------------------------------------------------------


def _spoil(root: Path, name: str) -> None:
    file = root / "checkpoints" / f"step-{STEP}" / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata", "state.json"])
def test_bad_bytes_are_named_and_nothing_is_written(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path, name: str
) -> None:
    root, out = tmp_path / "run", tmp_path / "out" / "m.pt"
    shutil.copytree(trained[0], root)
    out.parent.mkdir()
    out.write_text("the old one")
    _spoil(root, name)
    with pytest.raises(CheckpointCorrupt, match=rf"{name}: expected .*(sha256|xxh3_128):.*found"):
        export(asked(root, out))
    assert (os.listdir(out.parent), out.read_text()) == (["m.pt"], "the old one")


def test_damage_in_files_that_are_not_needed_does_not_matter(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    root = tmp_path / "run"
    shutil.copytree(trained[0], root)
    _spoil(root, "rank-1.json")
    assert export(asked(root, tmp_path / "m.pt")).step == STEP


def test_an_existing_file_is_replaced_only_by_a_whole_one(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # B94
    out = tmp_path / "m.pt"
    out.write_text("the old one")
    read, reads = HeldCheckpoint.read, []

    def failing(self: HeldCheckpoint, one: Stored) -> torch.Tensor:
        assert out.read_text() == "the old one"
        reads.append(one)
        if len(reads) == 5:
            raise OSError(5, "Input/output error")
        return read(self, one)

    monkeypatch.setattr(HeldCheckpoint, "read", failing)
    with pytest.raises(OSError, match="Input/output error"):
        export(asked(trained[0], out))
    assert (os.listdir(tmp_path), out.read_text()) == (["m.pt"], "the old one")
    export(asked(trained[0], out))
    assert len(loaded(out)) == 13


def elastic(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        # As the installed command, which takes no module from the directory that it is run in.
        [sys.executable, "-P", "-m", "elastic", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


def test_a_full_disk_leaves_the_old_file_and_nothing_else(run: Path, tmp_path: Path) -> None:  # B94
    out = tmp_path / "m.pt"
    out.write_text("the old one")
    limit = 1000  # bytes of any file, less than the model has

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    failed = elastic("export", run, "--out", out, preexec_fn=full)
    assert failed.returncode == 1
    assert failed.stderr.startswith("Error: not exported: OSError: [Errno 27] File too large")
    assert "Traceback" not in failed.stderr
    assert (os.listdir(tmp_path), out.read_text()) == (["m.pt"], "the old one")


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(export_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"the export needs [0-9]+ bytes, 10 are free"):
        export(asked(trained[0], tmp_path / "m.pt"))
    assert os.listdir(tmp_path) == []


def test_an_interrupted_export_leaves_nothing(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(HeldCheckpoint, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export(asked(trained[0], tmp_path / "m.pt"))
    assert os.listdir(tmp_path) == []


def test_an_export_that_is_told_to_end_leaves_nothing(
    large: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "m.pt"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "elastic.training.export"),
            json.dumps(vars(asked(large[0], out, dtype="float64"))),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not os.listdir(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.002)
    assert os.listdir(tmp_path), "it never began to write"
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=60)
    assert (os.listdir(tmp_path), told) == ([], "")


class Told(BaseException):
    """What a signal raises, in whichever line it comes."""


def test_one_that_is_broken_off_in_any_line_says_nothing_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_thorough: bool
) -> None:
    said: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    tree = {"weight": Stored("weight", (3,), torch.float32)}

    def write(until: int | None) -> int:
        """Lines that were run; told to end in the one of that number."""
        num_lines = 0

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal num_lines
            code = frame.f_code
            here = Path(code.co_filename).name in ("zipfile.py", "tensor_file.py")
            if not here or code.co_name == "__del__":  # where Python itself drops what is raised
                return None
            num_lines += event == "line"
            if event == "line" and num_lines == until:
                raise Told
            return trace

        # The file is closed before what was raised, and with it the archive, is let go of.
        ends = contextlib.nullcontext() if until is None else pytest.raises(Told)
        with ends, open(tmp_path / "m.pt", "wb") as file:
            sys.settrace(trace)
            try:
                write_torch(file, tree, lambda stored: torch.ones(stored.shape))
            finally:
                sys.settrace(None)
        return num_lines

    num_lines = write(until=None)
    assert num_lines > 100
    for number in range(1, num_lines + 1, 1 if is_thorough else 3):
        assert write(until=number) == number
        gc.collect(0)
    assert said == []


# --- trust ---------------------------------------------------------------------------------------


def test_another_runs_checkpoint_is_not_exported(tmp_path: Path) -> None:  # B90
    root = saved(tmp_path, model=nn.Linear(2, 2))
    shutil.copytree(root / "checkpoints" / "step-1", root / "checkpoints" / "step-9")
    assert export(asked(root, tmp_path / "m.pt")).step == STEP
    (tmp_path / "m.pt").unlink()
    with pytest.raises(NothingYet, match="no complete checkpoint"):
        export(replace(asked(root, tmp_path / "m.pt"), run_id="another"))
    assert not (tmp_path / "m.pt").exists()


# --- as a verb -----------------------------------------------------------------------------------


def test_the_verb_exports_and_tells(run: Path, tmp_path: Path) -> None:
    before = fingerprint(run)
    # What lies in the operator's directory is none of the verb's business.
    (tmp_path / "torch.py").write_text("raise SystemExit(77)")
    (tmp_path / "elastic").mkdir()
    told = elastic("export", run, "--out", "m.pt", "--step", 4, "--json", cwd=tmp_path)
    assert (told.returncode, told.stderr) == (0, "")
    said = json.loads(told.stdout)
    assert said["out"] == str(tmp_path / "m.pt")
    assert (said["format"], said["step"], said["dtypes"]) == ("torch", 4, {"float64": 3})
    assert set(said) == set(Exported.__dataclass_fields__)
    assert fingerprint(run) == before


def test_the_verb_in_words(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts: dict[str, Any] = {
        "kind": "exported",
        "out": "/x/m.safetensors",
        "format": "safetensors",
        "step": 8,
        "bytes": 1500,
        "num_tensors": 3,
        "dtypes": {"float32": 2, "int64": 1},
        "with_optimizer": False,
        "duration_s": 1.2,
        "warnings": ["left out x"],
    }
    asked_for: list[Any] = []
    monkeypatch.setattr(
        "elastic.verbs.export._ask", lambda request: asked_for.append(request) or dict(facts)
    )
    told = CliRunner().invoke(main, ["export", str(run), "--out", "/x/m.safetensors"])
    assert told.exit_code == 0
    assert told.stdout == (
        "wrote /x/m.safetensors: safetensors, 1.5 kB, 3 tensors (2 float32, 1 int64) of step 8, "
        "in 1 s\n"
    )
    assert told.stderr == "Warning: left out x\n"
    assert (asked_for[0]["format"], asked_for[0]["tracked"]) == ("safetensors", "model")
    unknown = CliRunner().invoke(main, ["export", str(run), "--out", "m.xyz"])
    assert unknown.exit_code == 2
    assert "cannot tell the format from 'm.xyz': give --format" in unknown.output


def test_an_exporter_that_dies_without_a_word_is_told(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = tmp_path / "killed"
    killed.write_text("#!/bin/sh\nkill -9 $$\n")
    killed.chmod(0o755)
    for program, said in (("/bin/false", "exit code 1"), (killed, "not enough memory")):
        monkeypatch.setattr("elastic.verbs.export.sys.executable", str(program))
        told = CliRunner().invoke(main, ["export", str(run), "--out", str(tmp_path / "m.pt")])
        assert told.exit_code == 1
        assert said in told.stderr


@pytest.mark.parametrize(
    ("out", "changes", "code", "reason"),
    [
        ("m.pt", {"step": 3}, 2, "no checkpoint of step 3; complete ones: [1]"),
        ("m.pt", {"tracked": "ema"}, 2, "no module as 'ema'; it tracks the modules model"),
        ("nowhere/m.pt", {}, 2, "there is no directory"),
        (".", {}, 2, "is no file: give a file name"),
        ("m.pt", {"run_id": "new"}, 1, "this run has no complete checkpoint"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    trained: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    out: str,
    changes: dict[str, Any],
    code: int,
    reason: str,
) -> None:
    request = replace(asked(trained[0], tmp_path / out), **changes)
    said = answer(request, lambda what, done, all: None)
    assert (said["kind"], said["exit_code"]) == ("failed", code)
    assert reason in said["reason"]
    assert os.listdir(tmp_path) == []


def test_odd_characters_in_paths_are_just_characters(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:  # B62
    odd = tmp_path / "a [b] %20 #é"
    shutil.copytree(trained[0], odd / "run *")
    export(asked(odd / "run *", odd / "m [1]%20?.pt"))
    assert len(loaded(odd / "m [1]%20?.pt")) == 13
    assert sorted(os.listdir(odd)) == ["m [1]%20?.pt", "run *"]
    assert os.listdir(tmp_path) == [odd.name]


# --- damaged runs --------------------------------------------------------------------------------


def test_damaged_runs_are_answered_for_and_left_alone(run: Path, tmp_path: Path) -> None:
    run_file = load_run_file(Filesystem.at(str(run)))
    assert run_file is not None
    codes = []
    for seed in range(100):
        root, out = tmp_path / str(seed) / "run", tmp_path / str(seed) / "out.file"
        shutil.copytree(run, root)
        print(f"seed {seed}: {'; '.join(damage(root, seed))}")
        before = fingerprint(root)
        form = ("torch", "safetensors")[seed % 2]
        request = Request(url=str(root), run_id=run_file.run_id, out=str(out), format=form)
        said = answer(request, lambda what, done, all: None)
        print(f"  {said}")
        assert fingerprint(root) == before, f"seed {seed}: export changed the run"
        codes.append(said.get("exit_code", 0))
        assert out.exists() == (said["kind"] == "exported")
        assert os.listdir(root.parent) == ["run"] or out.exists()
        if said["kind"] == "failed":
            assert said["reason"], f"seed {seed}"
            assert "\n" not in said["reason"], f"seed {seed}"
        shutil.rmtree(root.parent)
    assert set(codes) <= {0, 1, 2}
    assert codes.count(0) > 50
