"""Interruption notices, asked of local HTTP servers that answer as the clouds' documents say."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from click.testing import CliRunner

from elastic.cli import main
from elastic.cluster.notices import metadata
from elastic.cluster.notices.aws import AwsRebalance, AwsSpot
from elastic.cluster.notices.file import NoticeFile
from elastic.cluster.notices.gcp import PREEMPTED_S, GcpMaintenance, GcpPreempted
from elastic.cluster.notices.metadata import UnexpectedAnswer
from elastic.cluster.notices.notice import Notice
from elastic.cluster.notices.sources import checked, sources_of
from elastic.cluster.notices.vendor import detect
from elastic.cluster.notices.watch import Watch

SPOT = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
PREEMPTED = "/computeMetadata/v1/instance/preempted"
MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"


class Cloud:
    """A metadata service on a port of this machine."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.asked: list[str] = []
        self.changed = threading.Condition()
        self.tokens: set[str] = set()
        self.flavor: str | None = "Google"
        self.status: int | None = None
        self.location = ""
        self.patience_s = 0.05
        cloud = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                cloud.put(self)

            def do_GET(self) -> None:
                cloud.get(self)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def set(self, path: str, value: str) -> None:
        with self.changed:
            self.values[path] = value
            self.changed.notify_all()

    def answer(self, request: Any, status: int, text: str = "", **headers: str) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name.replace("_", "-"), value)
        request.send_header("Content-Length", str(len(text)))
        request.end_headers()
        request.wfile.write(text.encode())

    def put(self, request: Any) -> None:
        self.asked.append(f"PUT {request.path}")
        ttl = request.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        is_good = request.path == "/latest/api/token" and 1 <= int(ttl or 0) <= 21600
        if self.status or not is_good:
            self.answer(request, self.status or 400)
            return
        token = f"token-{len(self.asked)}"
        self.tokens.add(token)
        self.answer(request, 200, token)

    def get(self, request: Any) -> None:
        self.asked.append(request.path)
        if self.status:
            self.answer(request, self.status, Location=self.location)
        elif request.path.startswith("/latest/"):
            self.get_of_aws(request)
        else:
            self.get_of_gcp(request)

    def get_of_aws(self, request: Any) -> None:
        if request.headers["X-aws-ec2-metadata-token"] not in self.tokens:
            self.answer(request, 401)
        elif request.path in self.values:
            self.answer(request, 200, self.values[request.path])
        else:
            self.answer(request, 404)

    def get_of_gcp(self, request: Any) -> None:
        if request.headers["Metadata-Flavor"] != "Google":
            self.answer(request, 403)
            return
        url = urlsplit(request.path)
        query = {name: found[0] for name, found in parse_qs(url.query).items()}
        with self.changed:
            if query.get("wait_for_change") == "true":
                self.changed.wait_for(
                    lambda: str(hash(self.values[url.path])) != query["last_etag"],
                    timeout=min(float(query["timeout_sec"]), self.patience_s),
                )
            value = self.values[url.path]
        flavor = {} if self.flavor is None else {"Metadata_Flavor": self.flavor}
        self.answer(request, 200, value, ETag=str(hash(value)), **flavor)


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    found = Cloud()
    yield found
    found.close()


def wait_for(condition: Callable[[], Any]) -> None:
    until_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.005)


# --- AWS -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_an_interruption_of_a_spot_instance_has_a_deadline(cloud: Cloud, action: str) -> None:
    source = AwsSpot(cloud.url)
    assert source.poll() is None
    cloud.set(SPOT, f'{{"action": "{action}", "time": "2026-09-18T08:22:00Z"}}')
    notice = source.poll()
    assert notice is not None and notice.kind == "aws-spot" and action in notice.text
    assert notice.deadline_s == 1789719720
    assert source.poll() == notice
    assert cloud.asked.count("PUT /latest/api/token") == 1


def test_a_token_that_has_expired_is_replaced(cloud: Cloud) -> None:
    source = AwsSpot(cloud.url)
    source.poll()
    cloud.tokens.clear()
    cloud.set(SPOT, '{"action": "stop", "time": "2026-09-18T08:22:00Z"}')
    assert source.poll() is not None
    assert cloud.asked.count("PUT /latest/api/token") == 2


def test_an_interruption_without_a_time_stands_all_the_same(cloud: Cloud) -> None:
    cloud.set(SPOT, '{"action": "terminate", "time": "soon"}')
    notice = AwsSpot(cloud.url).poll()
    assert notice is not None and notice.deadline_s is None


@pytest.mark.parametrize("text", ["<html>", "[]", '{"action": "none"}', "{}"])
def test_what_aws_does_not_say_is_no_notice(cloud: Cloud, text: str) -> None:
    cloud.set(SPOT, text)
    with pytest.raises(UnexpectedAnswer):
        AwsSpot(cloud.url).poll()


@pytest.mark.parametrize("status", [403, 429, 500, 503])
def test_a_metadata_service_that_refuses_gives_no_notice(cloud: Cloud, status: int) -> None:
    known = AwsSpot(cloud.url)
    known.poll()
    cloud.status = status
    for source in (known, AwsSpot(cloud.url), GcpPreempted(cloud.url), GcpMaintenance(cloud.url)):
        with pytest.raises(UnexpectedAnswer, match=f"HTTP {status}"):
            source.poll()


def test_a_rebalance_recommendation_has_no_deadline(cloud: Cloud) -> None:
    source = AwsRebalance(cloud.url)
    assert source.poll() is None
    cloud.set(REBALANCE, '{"noticeTime": "2026-09-18T08:20:00Z"}')
    notice = source.poll()
    assert notice is not None and notice.deadline_s is None
    assert "2026-09-18T08:20:00Z" in notice.text
    assert AwsSpot(cloud.url).poll() is None


# --- GCP -----------------------------------------------------------------------------------------


def test_a_preemption_leaves_half_a_minute_from_when_it_was_heard(cloud: Cloud) -> None:
    times_s = iter(range(1000, 2000))
    source = GcpPreempted(cloud.url, now_s=lambda: next(times_s))
    cloud.set(PREEMPTED, "FALSE")
    assert source.poll() is None
    cloud.set(PREEMPTED, "TRUE")
    notice = source.poll()
    assert notice is not None and notice.deadline_s == 1000 + PREEMPTED_S
    again = GcpPreempted(cloud.url, now_s=lambda: next(times_s))
    assert again.poll() == again.poll() != notice, "the same notice is told by the same deadline"


def test_gcp_holds_the_question_back_until_the_value_changes(cloud: Cloud) -> None:
    cloud.set(PREEMPTED, "FALSE")
    cloud.patience_s = 10.0
    source = GcpPreempted(cloud.url)
    source.poll()
    found: list[Notice | None] = []
    asking = threading.Thread(target=lambda: found.append(source.poll()), daemon=True)
    asking.start()
    wait_for(lambda: len(cloud.asked) == 2)
    cloud.set(PREEMPTED, "TRUE")
    asking.join(timeout=10)
    assert found and found[0] is not None and len(cloud.asked) == 2
    assert "wait_for_change=true" in cloud.asked[1]


def test_a_question_after_a_failure_is_not_held_back(cloud: Cloud) -> None:
    cloud.set(PREEMPTED, "FALSE")
    source = GcpPreempted(cloud.url)
    source.poll()
    cloud.status = 503
    with pytest.raises(UnexpectedAnswer):
        source.poll()
    cloud.status = None
    source.poll()
    assert [("wait_for_change" in path) for path in cloud.asked] == [False, True, False]


@pytest.mark.parametrize("flavor", [None, "Other"])
def test_an_answer_that_is_not_from_googles_server_is_no_notice(
    cloud: Cloud, flavor: str | None
) -> None:
    cloud.set(PREEMPTED, "TRUE")
    cloud.flavor = flavor
    with pytest.raises(UnexpectedAnswer, match="Metadata-Flavor"):
        GcpPreempted(cloud.url).poll()


def test_maintenance_that_stops_the_machine_is_a_notice_and_one_that_moves_it_is_not(
    cloud: Cloud,
) -> None:
    found = {}
    for event in ("NONE", "MIGRATE_ON_HOST_MAINTENANCE", "TERMINATE_ON_HOST_MAINTENANCE"):
        cloud.set(MAINTENANCE, event)
        found[event] = GcpMaintenance(cloud.url).poll()
    notice = found.pop("TERMINATE_ON_HOST_MAINTENANCE")
    assert list(found.values()) == [None, None]
    assert notice is not None and notice.deadline_s is None
    cloud.set(MAINTENANCE, "SOMETHING")
    with pytest.raises(UnexpectedAnswer):
        GcpMaintenance(cloud.url).poll()


# --- how they are asked --------------------------------------------------------------------------


def test_no_proxy_and_no_redirect_comes_between(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Cloud()
    try:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, other.url)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        cloud.set(PREEMPTED, "TRUE")
        assert GcpPreempted(cloud.url).poll() is not None
        cloud.status, cloud.location = 302, other.url + PREEMPTED
        other.set(PREEMPTED, "TRUE")
        with pytest.raises(UnexpectedAnswer, match="HTTP 302"):
            GcpPreempted(cloud.url).poll()
        assert other.asked == []
    finally:
        other.close()


def test_a_metadata_service_that_stays_silent_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError):
        metadata.ask(f"http://127.0.0.1:{silent.getsockname()[1]}/", {}, timeout_s=0.05)


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content, deadline_s, said",
    [
        ("", None, []),
        ("90s\n", 1090.0, []),
        ("2026-09-18T08:22:00Z\nrack 7 goes\n", 1789719720.0, ["rack", "7", "goes"]),
        ("2026-09-18T08:22:00", 1789719720.0, []),
        ("rack 7 goes", None, ["rack", "7", "goes"]),
    ],
)
def test_a_file_is_a_notice_as_long_as_it_is_there(
    tmp_path: Path, content: str, deadline_s: float | None, said: list[str]
) -> None:
    path = tmp_path / "notice"
    source = NoticeFile(str(path))
    assert source.poll() is None
    path.write_text(content)
    os.utime(path, (1000, 1000))
    notice = source.poll()
    assert notice is not None and notice.deadline_s == deadline_s
    assert notice.text.split() == [str(path), "is", "there", *said]
    assert source.poll() == notice
    path.unlink()
    assert source.poll() is None


# --- which sources -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field, said, vendor",
    [
        ("sys_vendor", "Amazon EC2", "aws"),
        ("bios_version", "4.11.amazon", "aws"),
        ("product_name", "Google Compute Engine", "gcp"),
        ("sys_vendor", "Google", None),
        ("sys_vendor", "QEMU", None),
        ("sys_vendor", "Microsoft Corporation", None),
    ],
)
def test_the_firmware_says_whose_machine_this_is(
    tmp_path: Path, field: str, said: str, vendor: str | None
) -> None:
    (tmp_path / field).write_text(f"{said}\n")
    assert detect(tmp_path) == vendor


def test_auto_is_the_cloud_of_the_machine_and_nothing_elsewhere(tmp_path: Path) -> None:
    """Where the firmware names no cloud there is no source, and so nobody is ever asked."""
    assert sources_of(["auto"], dmi=tmp_path / "none") == []
    (tmp_path / "sys_vendor").write_text("Amazon EC2\n")
    assert [type(source) for source in sources_of(["auto"], dmi=tmp_path)] == [AwsSpot]
    both = sources_of(["auto", "aws", "aws-rebalance"], dmi=tmp_path)
    assert [type(source) for source in both] == [AwsSpot, AwsRebalance]
    (tmp_path / "sys_vendor").write_text("Google\n")
    (tmp_path / "product_name").write_text("Google Compute Engine\n")
    found = [type(source) for source in sources_of(["auto"], dmi=tmp_path)]
    assert found == [GcpPreempted, GcpMaintenance]
    assert sources_of(["none"], dmi=tmp_path) == []


def test_the_path_of_a_file_may_name_the_node() -> None:
    (source,) = sources_of(["file:/run/notices/{node_id}"], node_id="abc")
    assert source.name == "file:/run/notices/abc"


@pytest.mark.parametrize("name", ["azure", "", "file:", "file:relative", "AWS"])
def test_a_source_that_there_is_not_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match="notices come from"):
        checked(name)
    assert checked("auto") == ("auto",) and checked(["aws", "file:/x"]) == ("aws", "file:/x")


@pytest.mark.parametrize(
    "words, said",
    [
        (["agent", "--source", "azure"], "notices come from"),
        (["agent", "--address", "http://127.0.0.1:8265"], "is no HOST:PORT"),
        (["drain", "--node-id", "abc"], "56 hexadecimal digits"),
        (["drain", "--grace", "soon"], "cannot read a duration"),
    ],
)
def test_wrong_usage_of_the_node_verbs_is_told_before_ray_is_loaded(
    words: list[str], said: str
) -> None:
    found = CliRunner().invoke(main, ["node", *words])
    assert found.exit_code == 2 and said in found.output


# --- the watch -----------------------------------------------------------------------------------


class Scripted:
    """A source that says these one after the other, and the last of them for ever."""

    name = "scripted"
    interval_s = 0.0

    def __init__(self, *words: Notice | Exception | None) -> None:
        self.words = list(words)
        self.num_polls = 0

    def poll(self) -> Notice | None:
        word = self.words[min(self.num_polls, len(self.words) - 1)]
        self.num_polls += 1
        time.sleep(0.001)
        if isinstance(word, Exception):
            raise word
        return word


def notice(deadline_s: float | None) -> Notice:
    return Notice(kind="file", deadline_s=deadline_s, text="")


def test_each_notice_is_told_once_and_each_trouble_too() -> None:
    down, refused = OSError("down"), OSError("refused")
    source = Scripted(
        *(down, down, refused, None, down),
        *(notice(1), notice(1), down, notice(1), notice(2), None, notice(2)),
    )
    told: list[Notice] = []
    troubles: list[str] = []
    watch = Watch([source], told.append, troubles.append)
    wait_for(lambda: source.num_polls > len(source.words) + 5)
    watch.end()
    assert told == [notice(1), notice(2), notice(2)]
    assert [trouble.rpartition(" ")[2] for trouble in troubles] == [
        *("down", "refused", "down", "down")
    ]


def test_one_source_that_waits_does_not_keep_another_from_telling() -> None:
    class Stuck(Scripted):
        def poll(self) -> Notice | None:
            released.wait(20)
            return None

    released = threading.Event()
    told: list[Notice] = []
    watch = Watch([Stuck(None), Scripted(notice(None))], told.append)
    try:
        wait_for(lambda: told)
    finally:
        watch.end()
        released.set()
