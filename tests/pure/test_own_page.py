"""The run's own page: an address at once, a process from the first look on, gone with the run."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.cluster.own_page import TOKEN, OwnPage, checked
from elastic.policy.addresses import Address
from tests.eventful_run import eventful_run

LOOPBACK = Address(host="127.0.0.1", port=0)


@pytest.fixture
def run_url(tmp_path: Path) -> str:
    eventful_run(tmp_path / "eventful", "eventful")
    return str(tmp_path / "eventful")


@pytest.fixture
def page(run_url: str) -> Iterator[OwnPage]:
    page = OwnPage(run_url, LOOPBACK, "")
    yield page
    page.close()


def given(page: OwnPage, **headers: str) -> Any:
    where, _, name = page.url.partition("/runs/")
    request = urllib.request.Request(f"{where}/api/runs/{name}", headers=headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def wait_for(what: str, happened: Callable[[], object]) -> None:
    until_s = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < until_s, f"no {what} within 30 s"
        time.sleep(0.02)


def page_processes() -> list[int]:
    """Children of this process that serve a page."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            command = (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == os.getpid() and b"elastic.dashboard.page" in command:
            found.append(int(stat.parent.name))
    return found


def test_nothing_runs_until_somebody_looks_and_nothing_once_it_is_closed(
    page: OwnPage, run_url: str
) -> None:
    assert page.url.startswith("http://127.0.0.1:") and page.url.endswith("/runs/eventful")
    assert page_processes() == []
    assert given(page)["status"]["state"] == "FAILED"
    (pid,) = page_processes()
    assert os.getpriority(os.PRIO_PROCESS, pid) == 19
    page.close()
    wait_for("end of its process", lambda: page_processes() == [])
    with pytest.raises(OSError):
        given(page)


def test_a_page_whose_process_was_killed_is_served_again(page: OwnPage) -> None:
    given(page)
    (pid,) = page_processes()
    os.kill(pid, signal.SIGKILL)
    wait_for("end of its process", lambda: page_processes() == [])
    assert given(page)["status"]["name"] == "eventful"


def test_b89_another_address_than_loopback_needs_a_token(run_url: str) -> None:
    with pytest.raises(ValueError, match=f"set {TOKEN} where the run is submitted"):
        checked("0.0.0.0:0", {})
    address = checked("0.0.0.0:0", {TOKEN: "a-word"})
    assert address == Address(host="0.0.0.0", port=0)
    page = OwnPage(run_url, address, "a-word")
    try:
        assert "a-word" not in page.url
        with pytest.raises(urllib.error.HTTPError, match="401"):
            given(page)
        assert given(page, Authorization="Bearer a-word")["status"]["name"] == "eventful"
    finally:
        page.close()


@pytest.mark.parametrize("page", ["8266", "127.0.0.1", "127.0.0.1:x", "::1", ":1", "h:65536", ""])
def test_what_is_no_address_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="page: expected HOST:PORT"):
        checked(page, {TOKEN: "a-word"})


def test_addresses_that_are() -> None:
    assert checked("none", {}) is None
    assert checked("[::1]:8266", {}) == Address(host="::1", port=8266)
    assert checked("localhost:0", {}) == Address(host="localhost", port=0)


def test_where_it_cannot_listen_the_run_goes_on_without(
    page: OwnPage, run_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    port = int(page.url.partition("127.0.0.1:")[2].partition("/")[0])
    second = OwnPage(run_url, Address(host="127.0.0.1", port=port), "")
    assert second.url == "" and "no page of its own" in caplog.text
    second.close()
