"""The web page over real HTTP: what it answers, to whom, and that its figures are the reports'."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from elastic.cli import main
from elastic.dashboard.goodput import read_goodput
from elastic.dashboard.page import evidence, series
from elastic.dashboard.page.guard import Guard
from elastic.dashboard.page.run_document import RunPage
from elastic.dashboard.page.server import PageServer
from elastic.dashboard.restarts import restarts_of, totals
from elastic.dashboard.run_list import list_runs
from elastic.dashboard.run_picture import RunReader
from elastic.dashboard.status import AGES
from elastic.dashboard.tries_left import tries_left
from elastic.storage.filesystem import Filesystem
from elastic.storage.ledger import LedgerWriter, read_ledger
from elastic.storage.run_file import load_run_file
from tests.eventful_run import CAUSES, HANG_STACKS, Story, eventful_run, long_run
from tests.made_run import BORN_S, add_checkpoint, fingerprint, make_run

STATIC = Path(__file__).resolve().parents[2] / "elastic" / "dashboard" / "static"
NASTY = "<img src=x onerror=alert(1)></script>\"'"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    eventful_run(root / "eventful")
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[PageServer]:
    with PageServer(Filesystem.at(str(root))) as server:
        yield server


def ask(
    server: PageServer, path: str, *, method: str = "GET", host: str = "", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    told = {"Host": host or f"127.0.0.1:{server.port}", **headers}
    try:
        connection.request(method, path, headers=told)
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def given(server: PageServer, path: str) -> Any:
    status, _, body = ask(server, path)
    assert status == 200, body
    return json.loads(body)


# --- figures -------------------------------------------------------------------------------------


def test_every_figure_is_that_of_the_reports(server: PageServer, root: Path) -> None:
    found = given(server, "/api/runs/eventful")
    fs = Filesystem.at(str(root / "eventful"))
    events = read_ledger(fs)
    restarts = restarts_of(events)
    assert [one["causes"] for one in found["restarts"]] == [[cause] for cause in CAUSES]
    for shown, one in zip(found["restarts"], restarts, strict=True):
        assert shown["causes"] == one.causes
        assert (shown["lost_steps"], shown["took_s"]) == (one.lost_steps, one.took_s)
        assert shown["phases_s"] == one.phases_s
        assert shown["reason"] == one.reason
    assert found["totals"]["lost_steps"] == totals(restarts).lost_steps == 12
    assert found["goodput"]["slot_seconds"] == read_goodput(fs, events).slot_seconds
    tries = tries_left(events)
    assert tries is not None
    assert [one["left"] for one in found["tries_left"]] == [one.left for one in tries]
    assert {one["budget"]: one["used"] for one in found["tries_left"]}["exceptions"] == 1
    assert found["status"]["state"] == "FAILED"
    assert "ValueError: bad sample 7" in found["status"]["reason"]


def test_the_list_is_that_of_elastic_runs(server: PageServer, root: Path) -> None:
    (shown,) = given(server, "/api/runs")["runs"]
    (row,) = list_runs(Filesystem.at(str(root)), now_s=time.time())
    for name in ("directory", "state", "step", "loss", "world_size", "restarts", "goodput"):
        assert shown[name] == getattr(row, name)


def test_a_replayed_step_has_one_current_row_with_its_newest_value(tmp_path: Path) -> None:
    """B88: killed at 12, checkpoint at 10: one row for 11 and 12, one restart, lost 2."""
    now = Story(tmp_path / "run", "run")
    now.begin(2)
    now.train(10)
    now.save()
    now.train(2)
    old = RunPage(now.fs, "run").document(0.0)["steps"]
    now.tell("worker_died", world_rank=1, step=12, reason="SIGKILL")
    now.decide("worker_killed", 1, "SIGKILL")
    now.go_on(1, 10, "SIGKILL")
    now.metrics.start(1, 11, now.time_s)
    for step in (11, 12):
        now.metrics.add(1, step, now.time_s, {"loss": 9.0, "tokens": 10.0, "step_s": 2.0})
    now.metrics.flush()
    found = RunPage(now.fs, "run").document(0.0)
    assert old["step"] == found["steps"]["step"] == [float(step) for step in range(1, 13)]
    assert old["loss"][-2:] != [9.0, 9.0] and found["steps"]["loss"][-2:] == [9.0, 9.0]
    assert found["steps"]["tokens_per_s"][-1] == 5.0
    (restart,) = found["restarts"]
    assert (restart["lost_steps"], restart["causes"]) == (2, ["worker_killed"])
    assert (restart["old_world_size"], restart["new_world_size"]) == (2, 1)
    assert restart["time_s"] > 0


def test_the_document_changes_with_its_run_only(tmp_path: Path) -> None:
    """An age in it would have every open page draw itself anew at each look, and `elastic watch
    --json` print a line for it."""
    catalog = make_run(tmp_path / "run", archive=f"{tmp_path}/cold", keep_every=1)
    fs, run_file = catalog.fs, load_run_file(catalog.fs)
    assert run_file is not None
    snapshots = {"every": 2, "step": 6, "kept_s": BORN_S + 2, "skipped": 0, "problem": ""}
    add_checkpoint(catalog, 4)
    with closing(LedgerWriter(fs, 0, "life0")) as ledger:
        ledger.append("run_started", time_s=BORN_S)
        ledger.append("checkpoint_committed", step=4, time_s=BORN_S + 1)
        ledger.append("archive_failed", step=4, time_s=BORN_S + 1, reason="full")
        progress = {"snapshots": snapshots, "state": "RUNNING"}
        ledger.append("progress", step=7, time_s=BORN_S + 3, data=progress)
    page = RunPage(fs, "run")
    early, late = page.document(BORN_S + 4), page.document(BORN_S + 7)
    assert early == late
    assert early["status"]["snapshots"] == snapshots
    pictures = [RunReader(fs).picture(run_file, now_s=BORN_S + after) for after in (4, 7)]
    told = [asdict(one.status) for one in pictures]
    assert {name for name in told[0] if told[0][name] != told[1][name]} == AGES
    assert early["status"]["archive"]["failing_since_s"] == BORN_S + 1


def test_lanes_tell_of_each_node_what_happened_on_it(server: PageServer) -> None:
    lanes = {one["node_ip"]: one for one in given(server, "/api/runs/eventful")["lanes"]}
    whats = {ip: [mark["what"] for mark in lane["marks"]] for ip, lane in lanes.items()}
    assert whats["192.0.2.3"] == ["death", "strike", "death", "strike", "kept out"]
    assert whats["192.0.2.4"] == ["node lost"]
    assert whats["192.0.2.5"] == ["drain"]
    assert [len(lane["spans"]) for lane in lanes.values()] == [1, 2, 2, 1]


def test_saves_say_what_became_of_them(server: PageServer) -> None:
    saves = {one["step"]: one for one in given(server, "/api/runs/eventful")["saves"]}
    assert saves[40]["state"] == "quarantined"
    assert "digest differs" in saves[40]["why"]
    assert (saves[35]["state"], saves[35]["verified"]) == ("complete", True)
    assert (saves[35]["duration_s"], saves[35]["stall_s"]) == (0.9, 0.08)


def test_stories_logs_and_stacks_are_one_question_away(server: PageServer) -> None:
    story = given(server, "/api/runs/eventful/restarts/5")
    assert "rank 1 held up the others" in story["text"] and story["stacks"] == HANG_STACKS
    found = given(server, "/api/runs/eventful/evidence")
    (dump,) = found["stacks"]
    stack = given(server, f"/api/runs/eventful/stacks/{dump['dump']}/rank1.txt")
    assert "train.py" in stack[1]
    (log,) = found["logs"]
    lines = given(server, f"/api/runs/eventful/logs/{log['generation']}/0")
    assert lines[1] == "\\x1b[31mValueError: bad sample\\x1b[0m"
    for path in ("restarts/99", "logs/77/0", "stacks/g1-1/rank0.txt"):
        assert ask(server, f"/api/runs/eventful/{path}")[0] == 404


def test_long_series_are_thinned_and_keep_their_extremes() -> None:
    losses = {step: {"loss": 100.0 if step == 7777 else 1.0} for step in range(50_000)}
    found = series.by_step(losses)
    assert len(found["step"]) <= series.MOST_POINTS
    assert found["step"][0] == 0.0 and found["step"][-1] == 49_999.0
    assert 100.0 in found["loss"]


def test_the_document_of_a_long_run_is_bounded(tmp_path: Path) -> None:
    now = long_run(tmp_path / "long", num_events=4000, num_generations=300)
    document = RunPage(now.fs, "long").document(0.0)
    assert document["num_restarts"] == 299 and len(document["restarts"]) == 250
    assert len(json.dumps(document)) < 400_000


def test_looking_changes_nothing(root: Path, server: PageServer) -> None:
    before = fingerprint(root)
    for path in ("/", "/api/runs", "/api/runs/eventful", "/api/runs/eventful/evidence"):
        assert ask(server, path)[0] == 200
    assert fingerprint(root) == before


# --- who may ask, and how ------------------------------------------------------------------------


def test_it_listens_on_loopback_alone_unless_told(server: PageServer) -> None:
    """B89: listen sockets after start."""
    wanted = f":{server.port:04X}"
    listening = [
        line.split()[1]
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and line.split()[1].endswith(wanted)
    ]
    assert listening == [f"0100007F{wanted}"]


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_it_only_reads(server: PageServer, method: str) -> None:
    """B89: each verb, also under a foreign name, whose refusal comes first."""
    refusal = Guard(is_loopback=True).refuse(method=method, host="localhost", origin=None, given=[])
    assert refusal is not None and refusal.status == 405
    for path in ("/", "/api/runs", "/api/runs/eventful"):
        assert ask(server, path, method=method)[0] == 405
        assert ask(server, path, method=method, host="evil.example")[0] == 403
        assert ask(server, path, method=method, Origin="http://evil.example")[0] == 403


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "192.0.2.9", "", "[::"])
def test_under_a_foreign_name_it_says_nothing(server: PageServer, host: str) -> None:
    """B89: DNS rebinding brings a foreign Host to a loopback address."""
    guard = Guard(is_loopback=True)
    assert guard.refuse(method="GET", host=host, origin=None, given=[]) is not None
    if host:
        status, _, body = ask(server, "/api/runs", host=host)
        assert status in (400, 403) and b"eventful" not in body


def test_own_names_are_answered_at_any_port(server: PageServer) -> None:
    for host in ("localhost", "127.0.0.1:7777", "[::1]:80", "LOCALHOST:1"):
        assert ask(server, "/api/runs", host=host)[0] == 200


def test_a_page_of_another_origin_may_not_ask(server: PageServer) -> None:
    """B89: requests with a foreign Origin."""
    host = f"127.0.0.1:{server.port}"
    for origin in ("http://evil.example", "null", f"http://127.0.0.1:{server.port + 1}", "[::"):
        assert ask(server, "/api/runs", Origin=origin)[0] == 403
    assert ask(server, "/api/runs", Origin=f"http://{host}")[0] == 200


def test_another_address_needs_a_token(root: Path) -> None:
    """B89: without the token nothing is answered. Once shown it is out of the address, and a cookie
    that does not hold it, named for the port, does for the rest."""
    fs = Filesystem.at(str(root))
    with pytest.raises(ValueError, match="needs a token"):
        PageServer(fs, host="0.0.0.0")
    with PageServer(fs, host="0.0.0.0", token="secret-word") as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": "elastic_page=x"}):
            for path in ("/", "/api/runs", "/static/app.js"):
                assert ask(server, path, **headers)[0] == 401
        assert ask(server, "/api/runs?token=wrong")[0] == 401
        assert ask(server, "/api/runs", Authorization="Bearer secret-word")[0] == 200
        status, headers, _ = ask(server, "/runs/eventful?token=secret-word")
        assert (status, headers["location"]) == (303, "/runs/eventful")
        cookie = headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        assert cookie.startswith(f"elastic_page_{server.port}=") and "secret-word" not in cookie
        known = cookie.split(";")[0]
        assert ask(server, "/api/runs", Cookie=known)[0] == 200
        assert ask(server, "/api/runs", Cookie=known, host="evil.example")[0] == 403
        assert server.url.endswith("/?token=secret-word")


@pytest.mark.parametrize(
    "path", ["/", "/api/runs", "/nowhere", "/static/app.css", "/api/runs/none"]
)
def test_every_answer_carries_the_policy(server: PageServer, path: str) -> None:
    """B92: nothing that slipped into the page would run."""
    _, headers, _ = ask(server, path)
    policy = headers["content-security-policy"]
    for rule in (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
    ):
        assert rule in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/..",
        "/api/runs/%2e%2e",
        "/api/runs/%2e%2e%2fsecret",
        "/api/runs/eventful%2frun.json",
        "/api/runs/link",
        "/api/runs/eventful/stacks/..%2f..%2fsecret/rank0.txt",
        "/api/runs/eventful/stacks/g9-9/rank0.txt",
        "/api/runs/eventful/logs/9/0",
        "/static/../app.py",
        "/static/%2e%2e/goodput.py",
        "/static/vendor/../../__init__.py",
        "/static//etc/passwd",
    ],
)
def test_nothing_outside_of_the_root_is_read(tmp_path: Path, path: str) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    for name in ("run.json", "rank0.txt", "rank0.log"):
        (secret / name).write_text("hidden")
    root = tmp_path / "runs"
    eventful_run(root / "eventful")
    (root / "link").symlink_to(secret)
    (root / "eventful" / "stacks" / "g9-9").symlink_to(secret)
    (root / "eventful" / "logs" / "g9").symlink_to(secret)
    with PageServer(Filesystem.at(str(root))) as server:
        status, _, body = ask(server, path)
        assert status in (400, 404) and b"hidden" not in body
        assert [run["directory"] for run in given(server, "/api/runs")["runs"]] == ["eventful"]


def test_contained_means_after_all_links(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "here").mkdir()
    (tmp_path / "runs" / "out").symlink_to(tmp_path)
    fs = Filesystem.at(str(tmp_path / "runs"))
    assert evidence.is_contained(fs, "here") and not evidence.is_contained(fs, "out")


def test_what_a_run_recorded_reaches_the_page_as_json_alone(tmp_path: Path) -> None:
    """B92: names, exceptions and logs with markup; the browser test shows that it stays text."""
    now = Story(tmp_path / f"run {NASTY.replace('/', '')}", NASTY)
    now.begin(1)
    now.tell("rank_failed", world_rank=0, reason=NASTY, data={"traceback": NASTY})
    with PageServer(Filesystem.at(str(tmp_path))) as server:
        _, headers, body = ask(server, "/api/runs")
        assert headers["content-type"].startswith("application/json")
        (run,) = json.loads(body)["runs"]
        assert run["name"] == NASTY
        assert NASTY.encode() not in ask(server, "/")[2]


def test_the_script_never_makes_markup_from_text() -> None:
    """B92: everything goes through textContent."""
    for path in STATIC.glob("*.js"):
        text = path.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text), (
            path
        )
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"\son\w+=|style=|<style|<script(?![^>]*src=)", page)
    sources = re.findall(r'(?:src|href)="([^"#]+)"', page)
    assert all(source.startswith(("/", "data:")) for source in sources), "nothing from elsewhere"


# --- the stream, the thread ----------------------------------------------------------------------


def next_document(stream: http.client.HTTPResponse) -> Any:
    while True:
        line = stream.readline()
        assert line, "the stream has ended"
        if line.startswith(b"data: "):
            return json.loads(line.removeprefix(b"data: "))


def test_a_new_event_is_pushed(tmp_path: Path) -> None:
    now = Story(tmp_path / "run", "run", born_s=time.time())
    now.begin(1)
    with PageServer(Filesystem.at(str(tmp_path))) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.request("GET", "/api/runs/run/changes")
        stream = connection.getresponse()
        assert stream.headers["Content-Type"].startswith("text/event-stream")
        assert next_document(stream)["status"]["step"] == 0
        now.tell("progress", step=7, data={"state": "RUNNING"})
        assert next_document(stream)["status"]["step"] == 7
        connection.close()


def test_it_starts_on_a_free_port_and_frees_it_when_stopped(tmp_path: Path) -> None:
    server = PageServer(Filesystem.at(str(tmp_path)), texts={"/metrics": lambda: "up 1\n"})
    server.start()
    assert ask(server, "/metrics")[2] == b"up 1\n"
    assert ask(server, "/metrics", host="evil.example")[0] == 403
    with pytest.raises(OSError):
        PageServer(Filesystem.at(str(tmp_path)), port=server.port).start()
    server.stop()
    server.stop()
    with pytest.raises(ConnectionError), socket.create_connection(("127.0.0.1", server.port), 5):
        pass


def test_the_verb_imports_the_server_only_when_it_serves() -> None:
    code = "import sys, elastic.cli; print([m for m in ('aiohttp', 'ray') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_verb_prints_where_it_serves_and_ends_when_interrupted(tmp_path: Path) -> None:
    eventful_run(tmp_path / "eventful")
    command = [sys.executable, "-m", "elastic", "dashboard", "--storage", str(tmp_path)]
    with subprocess.Popen(
        [*command, "--port", "0", "--json"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            with urllib.request.urlopen(f"{told['url']}metrics", timeout=20) as answer:
                assert b"elastic_run_state" in answer.read()
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    result = CliRunner().invoke(main, ["dashboard", "--storage", str(tmp_path / "nowhere")])
    assert result.exit_code == 2 and "there is no such directory" in result.output
    result = CliRunner().invoke(main, ["dashboard", "--storage", str(tmp_path / "eventful")])
    assert result.exit_code == 2 and "is a run itself" in result.output
