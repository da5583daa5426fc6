"""The lease: one owner at a time, whoever comes at once, and dead owners are found out."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.storage import lease
from elastic.storage.filesystem import Filesystem
from elastic.storage.lease import LeaseHeld, LeaseLost, acquire, read


@pytest.fixture(params=["local", "object"])
def fs(request: pytest.FixtureRequest, tmp_path: Path) -> Filesystem:
    return Filesystem.at(
        str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}"
    )


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.02)


def test_a_second_driver_is_told_who_holds_the_run(fs: Filesystem) -> None:
    held = acquire(fs, "job 1 on cluster a")
    with pytest.raises(LeaseHeld, match=rf"process {os.getpid()} on .*job 1 on cluster a"):
        acquire(fs, "job 2", stale_s=2.0)
    held.check()
    held.release()


def test_a_released_run_is_free_at_once(fs: Filesystem) -> None:
    acquire(fs, "first").release()
    begun_s = time.monotonic()
    second = acquire(fs, "second", stale_s=60.0)
    assert second.epoch == 2 and time.monotonic() - begun_s < 5.0
    second.release()


def test_an_owner_that_stands_still_is_replaced_and_fenced(
    fs: Filesystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(lease, "BEAT_S", 3600.0)
        stuck = acquire(fs, "stuck")
    new = acquire(fs, "new", stale_s=0.3)
    assert new.epoch == stuck.epoch + 1
    with pytest.raises(LeaseLost, match="leftover"):
        stuck.check()
    stuck.release()  # changes nothing: it is not its lease any more
    assert read(fs)[1].what == "new"
    new.check()
    new.release()


def test_of_many_at_once_one_gets_it(fs: Filesystem) -> None:
    got, refused, others = [], [], []
    together = threading.Barrier(8)

    def contend(number: int) -> None:
        together.wait()
        try:
            got.append(acquire(fs, f"contender {number}", stale_s=5.0))
        except LeaseHeld as error:
            refused.append(error)
        except BaseException as error:  # noqa: BLE001 - a test must not lose it
            others.append(error)

    threads = [threading.Thread(target=contend, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert others == [] and len(got) == 1 and len(refused) == 7
    got[0].release()


def _hold(url: str, held) -> None:
    acquire(Filesystem.at(url), "a process that dies")
    held.set()
    time.sleep(600)


def test_a_killed_process_on_this_machine_is_seen_to_be_dead(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held = context.Event()
    process = context.Process(target=_hold, args=(str(tmp_path), held))
    process.start()
    assert held.wait(30)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    begun_s = time.monotonic()
    acquire(Filesystem.at(str(tmp_path)), "next", stale_s=60.0).release()
    assert time.monotonic() - begun_s < 5.0


def test_a_garbled_lease_is_waited_for_and_then_taken(fs: Filesystem) -> None:
    fs.write_bytes("lease/000004.json", b"{")
    taken = acquire(fs, "next", stale_s=0.2)
    assert taken.epoch == 5
    taken.release()


def test_a_process_that_waits_to_be_reaped_is_dead() -> None:  # B74
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        holder = replace(lease._ourselves("a test"), pid=process.pid)
        assert not lease.is_dead(holder)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert Path(f"/proc/{process.pid}").exists() and lease.is_dead(holder)
