"""A run without Ray: real torchrun, ranks that die and come back, another size, refusals."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from elastic.cluster.elastic_config import ElasticConfig
from elastic.dashboard.status import read_status
from elastic.policy.mesh import Mesh
from elastic.policy.retention import Retention
from elastic.storage.access import StorageRefused
from elastic.storage.claim import RunSpec
from elastic.storage.filesystem import Filesystem
from elastic.storage.requests import SAVE, ask
from elastic.storage.run_file import RunFile, load_run_file
from elastic.training import process_group
from elastic.training.membership import TrainingConfig
from elastic.training.standalone import train_standalone
from elastic.training.torchrun import GroupNotMet, Place, Torchrun, meet, run_standalone
from jobs import pretrain
from tests.dist.torchrun_job import (
    SMALL,
    committed,
    events,
    finished,
    ranks_of,
    summary,
    torchrun,
    wait_for,
)
from tests.dist.undisturbed import undisturbed


@pytest.mark.timeout(300)
def test_ranks_killed_then_another_size(tmp_path: Path) -> None:
    flags = (*SMALL, "--storage", f"{tmp_path}/runs", "--save-every", "5")
    run = tmp_path / "runs/broken"
    replicated = ("--name", "broken", "--steps", "60", "--shard", "1")
    with torchrun(2, *flags, *replicated) as process:
        for victim, after in ((1, 10), (0, 30)):
            wait_for(lambda after=after: committed(run) >= after, process)
            os.kill(ranks_of(process.pid)[victim], signal.SIGKILL)
        code, out, err = finished(process)
    assert code == 0, err
    assert out.count("step 60: loss") == 1  # the summary, by rank 0 alone
    assert "restarts 2" in out
    assert len(events(run, "run_started")) == 3
    assert [event.data["lost_steps"] >= 0 for event in events(run, "recovered")] == [True] * 2
    resumed = [event.step for event in events(run, "resumed")]
    assert resumed[0] >= 10 and resumed[1] >= 30
    logs = run / "logs"
    assert "Traceback (most" in (logs / "g0/rank0.log").read_text()  # of rank 0, whose peer died
    assert "step 60: loss" not in (logs / "g2/rank0.log").read_text()  # told when it was over
    assert sorted(path.name for path in (logs / "g2").iterdir()) == ["rank0.log", "rank1.log"]
    assert "Traceback" not in err  # a rank that lost its peer says so in one line
    status = read_status(Filesystem.at(str(run)), load(run), now_s=time.time())
    assert (status.state, status.restarts, status.step) == ("FINISHED", 2, 60)
    assert load(run).operational["mesh"] == str(Mesh(shard=1))

    goes_on = (*flags, "--name", "broken", "--steps", "70", "--json", f"{tmp_path}/broken.json")
    with torchrun(1, *goes_on, "--quiet") as process:
        code, _, err = finished(process)
    assert code == 0, err
    with torchrun(1, *goes_on, "--quiet") as process:
        code, out, _ = finished(process)
    assert code == 0 and out.count("is finished at step 70 already: there was nothing to do") == 1
    broken = summary(tmp_path / "broken.json")
    whole = undisturbed(2, tmp_path, *flags, "--steps", "70")
    assert broken["world_sizes"] == [2, 2, 2, 1, 1]
    for name in ("losses", "grad_norms"):
        assert broken[name].keys() == whole[name].keys() == {str(n) for n in range(1, 71)}
        for step, value in whole[name].items():
            assert broken[name][step] == pytest.approx(value, rel=1e-9, abs=0)


def load(run: Path) -> RunFile:
    found = load_run_file(Filesystem.at(str(run)))
    assert found is not None
    return found


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_held_then_stopped_then_of_another_kind(tmp_path: Path) -> None:
    flags = (*SMALL, "--storage", f"{tmp_path}/runs", "--name", "run")
    run = tmp_path / "runs/run"
    with torchrun(2, *flags, "--steps", "100000", "--save-every", "100000") as process:
        wait_for(lambda: committed(run) == 0, process)
        with torchrun(2, *flags, restarts=0) as other:
            code, _, err = finished(other)
        assert code != 0 and err.count("is held by process") == 1, err
        asked = ask(Filesystem.at(str(run)), SAVE, who="a test", time_s=time.time(), epoch=1)
        wait_for(lambda: committed(run) > 0, process)
        assert [event.data["id"] for event in events(run, "request_taken")] == [asked.id]
        process.terminate()
        _, out, _ = finished(process)
    (stopped,) = events(run, "run_stopped")
    assert stopped.step > 0 and committed(run) == stopped.step
    assert f"STOPPED   step {stopped.step}/" in out

    before = {path for path in run.rglob("*") if "lease" not in path.parts}
    with torchrun(2, *flags, "--lr", "3", restarts=1) as process:
        code, _, err = finished(process)
    # Once, though two ranks of two attempts have met it.
    assert code != 0 and err.count("was begun with another configuration: lr:") == 1, err
    assert "pretrain.py" not in err  # no traceback of ours
    assert {path for path in run.rglob("*") if "lease" not in path.parts} == before


def test_bad_input_ends_every_rank_before_anything(tmp_path: Path) -> None:
    flags = ("--storage", f"{tmp_path}/runs", *SMALL, "--name", "run", "--global-batch", "1")
    with torchrun(2, *flags, restarts=0) as process:
        code, _, err = finished(process)
    assert code != 0 and err.count("less than one sample to each of 2 workers") == 1, err
    assert "exitcode  : 2" in err and "exitcode  : 1" not in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("rank, restarts", [(0, 0), (0, 1), (1, 0)])
def test_bad_flags_are_told_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rank: int, restarts: int
) -> None:
    told = {"RANK": rank, "WORLD_SIZE": 2, "TORCHELASTIC_RESTART_COUNT": restarts}
    for name, value in {**told, "TORCHELASTIC_RUN_ID": "job"}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(SystemExit) as ended:
        pretrain.main(["--no-such-flag"])
    assert ended.value.code == 2
    assert ("unrecognized arguments" in capsys.readouterr().err) == (rank == restarts == 0)
    if restarts == 0:
        assert pretrain.main(["--storage", "/none", *SMALL]) == 2
        assert ("give --name" in capsys.readouterr().err) == (rank == 0)


# --- the place ----------------------------------------------------------------------------------

PLACE = Place(
    job="job",
    restarts=1,
    max_restarts=3,
    world_rank=0,
    world_size=3,
    local_rank=0,
    local_world_size=3,
    host="127.0.0.1",
    port=1,
    has_agents_store=True,
)


def test_no_place_without_torchrun() -> None:
    assert Place.read({"RANK": "0", "WORLD_SIZE": "2"}) is None


def test_ranks_meet_beside_what_an_older_attempt_left() -> None:
    server = process_group.open_store("127.0.0.1")
    for rank in (1, 2):
        server.set(f"here/{rank}", "left")
    server.set("attempt-1-left/in/1", "left")

    def attempt(rank: int) -> str:
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
        if rank > 0:
            store.wait(["name/left"])  # rank 0 has taken what was left for the ranks themselves
        mine = meet(store, dataclasses.replace(PLACE, world_rank=rank), timeout_s=10.0)
        if rank == 0:
            mine.set("word", "to all")
        return bytes(mine.get("word")).decode()

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(attempt, (0, 1, 2))) == ["to all"] * 3


def test_a_world_that_no_mesh_can_be_is_refused_before_anything(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"3 workers cannot be laid out as .*groups of 2"):
        run_standalone(
            lambda run: None,
            name="run",
            storage_path=str(tmp_path),
            mesh=Mesh(tensor=2),
            place=PLACE,
        )
    assert not list(tmp_path.iterdir())


def test_storage_that_cannot_be_written_is_refused_by_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = dist.HashStore()

    def rank(world_rank: int) -> str:
        with pytest.raises(StorageRefused) as caught:
            train_standalone(
                lambda run: None,
                TrainingConfig(run_url=f"{tmp_path}/file/run"),
                RunSpec(name="run", seed=0),
                Retention(keep=3),
                world_rank=world_rank,
                world_size=2,
                local_rank=world_rank,
                local_world_size=2,
                store=store,
            )
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        said, others = pool.map(rank, (0, 1))
    assert said == others and "NotADirectoryError" in said


@pytest.mark.parametrize("mesh", [{"tensor": 2}, (), "shard"])
def test_what_is_no_mesh_is_refused_at_once(tmp_path: Path, mesh: Any) -> None:
    found = f"mesh must be an elastic.Mesh, .* of type {type(mesh).__name__}"
    with pytest.raises(TypeError, match=found):
        run_standalone(
            lambda run: None, name="run", storage_path=str(tmp_path), mesh=mesh, place=PLACE
        )
    with pytest.raises(TypeError, match=found):
        ElasticConfig(mesh=mesh)
    assert not list(tmp_path.iterdir())


def test_a_signal_that_comes_twice_is_one_wish() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    launcher = Torchrun(PLACE, dist.HashStore())
    launcher.listen()
    try:
        assert not launcher.is_stop_asked()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
            assert launcher.is_stop_asked()
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(number, handler)


def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(GroupNotMet, match=r"ranks \[1, 2\] of 3"):
        meet(process_group.open_store("127.0.0.1"), PLACE, timeout_s=0.1)
