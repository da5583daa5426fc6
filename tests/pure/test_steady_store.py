"""A store that fails: what is tried again and what is not, and that nobody waits for ever."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.storage import deadline
from elastic.storage.checkpoints import Catalog
from elastic.storage.filesystem import Filesystem
from elastic.storage.local_store import LocalStore
from elastic.storage.object_store import ObjectStore
from elastic.storage.steady_store import Patience, SteadyStore, retries
from elastic.storage.store_errors import (
    StoreFailed,
    StoreStuck,
    has_expired,
    is_full,
    is_taken,
    is_transient,
)
from tests.made_run import add_checkpoint, make_run

QUICK = Patience(call_s=5.0, tries=3, first_wait_s=0.001, longest_wait_s=0.002)
HASTY = Patience(call_s=0.05, tries=2, first_wait_s=0.001, longest_wait_s=0.002)

Strike = Callable[[str, str], None]


class StruckStore:
    """A store; before each of its calls `strike(operation, path)` may raise or wait."""

    def __init__(self, store: Any, strike: Strike, after: Strike = lambda name, path: None) -> None:
        self.store = store
        self.strike = strike
        self.after = after
        self.scheme = store.scheme
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        act = getattr(self.store, name)

        def struck(path: str = "", *args: Any) -> Any:
            self.calls[name] += 1
            self.strike(name, path)
            found = act(path, *args) if name != "rebuild" else act()
            self.after(name, path)
            return found

        return struck


def once_each(error: BaseException) -> Strike:
    seen = set()

    def strike(*call: str) -> None:
        if call not in seen:
            seen.add(call)
            raise error

    return strike


def once_each_name(error: BaseException) -> Strike:
    once = once_each(error)
    return lambda name, path: once(name, "")


@pytest.fixture(params=["local", "object"])
def store(request: pytest.FixtureRequest) -> Any:
    return LocalStore() if request.param == "local" else ObjectStore("memory")


@pytest.fixture
def root(store: Any, tmp_path: Path) -> str:
    return str(tmp_path / "run") if not store.scheme else f"{uuid.uuid4().hex}/run"


@pytest.fixture(autouse=True)
def all_come_back() -> Iterator[None]:
    yield
    until_s = time.monotonic() + 5
    while deadline.num_left_behind() and time.monotonic() < until_s:
        time.sleep(0.005)
    assert deadline.num_left_behind() == 0


def test_each_call_fails_once_and_the_run_does_not_notice(store: Any, root: str) -> None:  # B56
    before = retries.total()
    flaky = StruckStore(store, once_each(OSError(errno.ESTALE, "Stale file handle")))
    fs = Filesystem(SteadyStore(flaky, QUICK), root)
    catalog = Catalog(fs, "me")
    for step in (10, 20):
        add_checkpoint(catalog, step)
    assert catalog.complete_steps() == [10, 20]
    assert catalog.verify_files(20) == []
    catalog.quarantine(20, "bad")
    catalog.remove(10)
    assert catalog.complete_steps() == []
    assert retries.total() - before >= 20


@pytest.mark.parametrize(
    "error", [PermissionError(errno.EACCES, "no"), OSError(errno.ENOSPC, "full"), ValueError("no")]
)
def test_what_is_refused_is_not_tried_again(  # B56
    store: Any, root: str, error: Exception
) -> None:
    def refuse(operation: str, path: str) -> None:
        raise error

    refusing = StruckStore(store, refuse)
    fs = Filesystem(SteadyStore(refusing, QUICK), root)
    acts: list[Callable[[], object]] = [
        lambda: fs.write_bytes("a", b"x"),
        fs.list,
        lambda: fs.create_new("b", b"x"),
        lambda: fs.open_input("a"),
    ]
    for act in acts:
        with pytest.raises(type(error)):
            act()
    assert set(refusing.calls.values()) == {1}


def test_many_small_files_are_read_in_order_although_each_call_fails_once(
    store: Any, root: str
) -> None:
    plain = Filesystem(store, root)
    paths = [f"many/{number:03d}" for number in range(150)]
    for path in paths:
        plain.write_bytes(path, path.encode())
    flaky = StruckStore(store, once_each_name(OSError(errno.ESTALE, "Stale file handle")))
    fs = Filesystem(SteadyStore(flaky, QUICK), root)
    assert fs.read_all(paths[::-1]) == [path.encode() for path in paths[::-1]]
    assert fs.read_all([]) == []
    with pytest.raises(FileNotFoundError):
        fs.read_all([*paths, "many/none"])
    with pytest.raises(ValueError, match="relative path"):
        fs.read_all(["../many"])
    assert plain.read_all(paths[:2]) == [b"many/000", b"many/001"]


def test_a_stuck_disk_holds_up_no_reader_of_many_files(tmp_path: Path) -> None:
    free = threading.Event()
    stuck = StruckStore(LocalStore(), lambda *call: free.wait(20) and None)
    fs = Filesystem(SteadyStore(stuck, Patience(call_s=0.05, tries=1)), str(tmp_path))
    try:
        with pytest.raises(StoreStuck, match=r"read_files .*/b: no answer within 0.05 s"):
            fs.read_all(["b", "c"])
    finally:
        free.set()


def test_tries_have_an_end(store: Any, root: str) -> None:
    def down(operation: str, path: str) -> None:
        raise ConnectionResetError("the other end has gone")

    failing = StruckStore(store, down)
    fs = Filesystem(SteadyStore(failing, QUICK), root)
    with pytest.raises(ConnectionResetError):
        fs.read_bytes("a")
    assert failing.calls["open_input"] == QUICK.tries


def test_credentials_that_expire_are_fetched_anew(  # B58
    store: Any, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Expiring(StruckStore):
        left = 5

        def rebuild(self) -> None:
            self.calls["rebuild"] += 1
            self.left = 5

    def expire(operation: str, path: str) -> None:
        expiring.left -= 1
        if expiring.left < 0:
            error = PermissionError("The provided token has expired.")
            error.__cause__ = answered("ExpiredToken", 400)
            raise error

    expiring = Expiring(store, expire)
    fs = Filesystem(SteadyStore(expiring, QUICK), root)
    for number in range(20):
        fs.write_bytes(f"{number}", b"x")
    assert len(fs.list()) == 20
    assert expiring.calls["rebuild"] >= 3
    assert "credentials have expired" in caplog.text


def test_a_client_that_stays_expired_is_given_up(store: Any, root: str) -> None:  # B58
    def expired(operation: str, path: str) -> None:
        if operation != "rebuild":
            raise PermissionError("ExpiredToken: the token has expired")

    failing = StruckStore(store, expired)
    with pytest.raises(PermissionError):
        Filesystem(SteadyStore(failing, QUICK), root).list()
    assert (failing.calls["list"], failing.calls["rebuild"]) == (3, 2)


def answered(code: str, status: int) -> Exception:
    """An error of botocore's, as its clients see it."""
    error = Exception(code)
    error.response = {  # type: ignore[attr-defined]
        "Error": {"Code": code},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return error


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TimeoutError("slow"), "transient"),
        (ConnectionResetError(), "transient"),
        (OSError(errno.ESTALE, "x"), "transient"),
        (OSError(errno.ENOSPC, "x"), "final"),
        (FileNotFoundError("x"), "final"),
        (PermissionError("x"), "final"),
        (caused(PermissionError("x"), answered("AccessDenied", 403)), "final"),
        (caused(PermissionError("x"), answered("ExpiredToken", 400)), "expired"),
        (caused(OSError(errno.EBUSY, "x"), answered("SlowDown", 503)), "transient"),
        (caused(OSError(errno.EINVAL, "x"), answered("InvalidArgument", 400)), "final"),
        (caused(OSError(errno.EINVAL, "x"), answered("PreconditionFailed", 412)), "taken"),
        (caused(OSError("x"), answered("InternalError", 500)), "transient"),
        (answered("NoSuchKey", 404), "final"),
        (
            type("ReadTimeoutError", (Exception,), {"__module__": "botocore.exceptions"})(),
            "transient",
        ),
        (
            type("ParamValidationError", (Exception,), {"__module__": "botocore.exceptions"})(),
            "final",
        ),
        (type("HttpError", (Exception,), {"code": 503})(), "transient"),
        (type("HttpError", (Exception,), {"code": 401})(), "expired"),
        (type("HttpError", (Exception,), {"code": 403})(), "final"),
        (ValueError("x"), "final"),
        (StoreStuck("x"), "transient"),
    ],
)
def test_errors_are_known_by_their_numbers(error: BaseException, expected: str) -> None:
    found = "transient" if is_transient(error) else "final"
    found = "expired" if has_expired(error) else "taken" if is_taken(error) else found
    assert found == expected


def test_a_full_store_is_known_by_its_words() -> None:
    assert is_full("RuntimeError: OSError: [Errno 28] No space left on device")
    assert is_full("[Errno 122] Disk quota exceeded: '/mnt'")
    assert not is_full("[Errno 13] Permission denied")


def test_a_clients_own_exception_is_an_os_error(root: str) -> None:
    def down(operation: str, path: str) -> None:
        raise type("EndpointConnectionError", (Exception,), {"__module__": "botocore.exceptions"})()

    fs = Filesystem(SteadyStore(StruckStore(ObjectStore("memory"), down), QUICK), "x")
    with pytest.raises(StoreFailed, match="EndpointConnectionError"):
        fs.list()


# --- calls that do not come back -----------------------------------------------------------------


class Hanging:
    """Strikes the calls of one operation: they do not come back before `release`."""

    def __init__(self, operation: str, path: str = "") -> None:
        self.operation, self.path = operation, path
        self.free = threading.Event()
        self.num = 0

    def __call__(self, operation: str, path: str) -> None:
        if operation == self.operation and path.endswith(self.path):
            self.num += 1
            assert self.free.wait(10)


@pytest.mark.parametrize("operation", ["list", "write_bytes", "open_output", "entry"])
def test_a_call_that_hangs_is_left_behind(store: Any, root: str, operation: str) -> None:
    hanging = Hanging(operation)
    fs = Filesystem(SteadyStore(StruckStore(store, hanging), HASTY), root)
    acts: dict[str, Callable[[], object]] = {
        "list": fs.list,
        "write_bytes": lambda: fs.write_bytes("a", b"x"),
        "open_output": lambda: fs.open_output("a").close(),
        "entry": lambda: fs.exists("a"),
    }
    with pytest.raises(StoreStuck, match=operation):
        acts[operation]()
    hanging.free.set()
    acts[operation]()


def test_a_stream_that_hangs_is_left_behind(store: Any, root: str) -> None:
    free = threading.Event()

    class Stream:
        def write(self, data: bytes) -> int:
            assert free.wait(10)
            return len(data)

        def close(self) -> None:
            pass

    class Streams(StruckStore):
        def open_output(self, path: str) -> Any:
            return Stream()

    fs = Filesystem(SteadyStore(Streams(store, lambda *call: None), HASTY), root)
    with pytest.raises(StoreStuck), fs.open_output("shard") as file:
        file.write(b"x")
    # It may write yet, so that nothing else goes to the same place meanwhile.
    for act in (lambda: fs.write_bytes("shard", b"y"), lambda: fs.remove_tree("shard")):
        with pytest.raises(StoreStuck, match="earlier call"):
            act()
    fs.write_bytes("shard-2", b"y")
    free.set()
    fs.write_bytes("shard", b"y")
    assert fs.read_bytes("shard") == b"y"


def test_what_was_left_behind_can_not_undo_what_came_later(store: Any, root: str) -> None:
    hanging = Hanging("write_bytes", "dir/marker")
    steady = Filesystem(SteadyStore(StruckStore(store, hanging), HASTY), root)
    with pytest.raises(StoreStuck):
        steady.write_bytes("dir/marker", b"old")
    others: list[Callable[[], object]] = [
        lambda: steady.write_bytes("dir/marker", b"new"),
        lambda: steady.remove_tree("dir"),
        lambda: steady.create_new("dir/marker", b"new"),
    ]
    for other in others:
        with pytest.raises(StoreStuck, match="earlier call"):
            other()
    assert not steady.exists("dir/marker")
    hanging.free.set()
    steady.write_bytes("dir/marker", b"new")
    assert steady.read_bytes("dir/marker") == b"new"
    # One try of the first, and one of the last: the others were never begun.
    assert hanging.num == 2


def test_no_more_than_so_many_are_left_behind(store: Any, root: str) -> None:
    hanging = Hanging("list")
    patience = Patience(call_s=0.001, tries=1)
    fs = Filesystem(SteadyStore(StruckStore(store, hanging), patience), root)
    try:
        for _ in range(deadline.MOST_LEFT_BEHIND + 5):
            with pytest.raises(StoreStuck):
                fs.list()
        assert deadline.num_left_behind() <= deadline.MOST_LEFT_BEHIND
        assert hanging.num <= deadline.MOST_LEFT_BEHIND
    finally:
        hanging.free.set()


def test_a_process_ends_although_a_call_hangs(tmp_path: Path) -> None:
    script = f"""
import threading
from elastic.storage.filesystem import Filesystem
from elastic.storage.local_store import LocalStore
from elastic.storage.steady_store import Patience, SteadyStore

class Stuck(LocalStore):
    def write_bytes(self, path, data):
        threading.Event().wait()

fs = Filesystem(SteadyStore(Stuck(), Patience(call_s=0.05, tries=1)), {str(tmp_path)!r})
try:
    fs.write_bytes("a", b"x")
except TimeoutError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "no answer within" in done.stdout


def test_a_forked_child_has_threads_of_its_own(tmp_path: Path) -> None:
    fs = Filesystem.at(str(tmp_path))
    fs.write_bytes("a", b"parent")
    child = os.fork()
    if child == 0:
        try:
            fs.write_bytes("a", fs.read_bytes("a") + b" and child")
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert fs.read_bytes("a") == b"parent and child"


# --- calls that may have taken effect ------------------------------------------------------------


def lost_answers(operation: str) -> Strike:
    """The first call of this operation does its work, and its answer is lost."""
    seen = []

    def after(name: str, path: str) -> None:
        if name == operation and not seen:
            seen.append(path)
            raise ConnectionResetError("no answer")

    return after


def test_made_and_told_so_although_the_answer_was_lost(store: Any, root: str) -> None:
    deaf = StruckStore(store, lambda *call: None, lost_answers("create_new"))
    fs = Filesystem(SteadyStore(deaf, QUICK), root)
    assert fs.create_new("lease", b"ours")
    assert fs.read_bytes("lease") == b"ours"
    assert not fs.create_new("lease", b"theirs")


def test_another_was_quicker_after_a_lost_answer(store: Any, root: str) -> None:
    plain = Filesystem(store, root)

    def steal(name: str, path: str) -> None:
        if name == "create_new" and not plain.exists("lease"):
            plain.write_bytes("lease", b"theirs")
            raise ConnectionResetError("no answer")

    fs = Filesystem(SteadyStore(StruckStore(store, steal), QUICK), root)
    assert not fs.create_new("lease", b"ours")
    assert fs.read_bytes("lease") == b"theirs"


def test_a_rename_whose_answer_was_lost_is_done(tmp_path: Path) -> None:
    deaf = StruckStore(LocalStore(), lambda *call: None, lost_answers("rename"))
    fs = Filesystem(SteadyStore(deaf, QUICK), str(tmp_path))
    fs.write_bytes("attempt/shard", b"x")
    fs.rename("attempt", "step-1")
    assert fs.read_bytes("step-1/shard") == b"x"
    with pytest.raises(FileNotFoundError):
        fs.rename("attempt", "step-2")


def test_a_rename_that_came_late_is_done(tmp_path: Path) -> None:
    before, hanging = retries["rename"], Hanging("rename")
    patience = Patience(call_s=0.3, tries=2, first_wait_s=0.001, longest_wait_s=0.002)
    fs = Filesystem(SteadyStore(StruckStore(LocalStore(), hanging), patience), str(tmp_path))
    fs.write_bytes("attempt/shard", b"x")

    def free_at_the_second_try() -> None:
        while retries["rename"] == before:
            time.sleep(0.001)
        hanging.free.set()

    threading.Thread(target=free_at_the_second_try).start()
    fs.rename("attempt", "step-1")
    assert fs.read_bytes("step-1/shard") == b"x"


def test_a_read_goes_on_where_it_broke_off() -> None:
    content = bytes(range(256)) * 20
    plain = Filesystem(ObjectStore("memory"), uuid.uuid4().hex)
    plain.write_bytes("shard", content)
    num_opened = 0

    class Breaking:
        """A stream that gives three pieces, then garbles its position and fails."""

        def __init__(self, inner: Any) -> None:
            self.inner, self.left = inner, 3

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def read(self, size: int) -> bytes:
            self.left -= 1
            if self.left < 0:
                self.inner.seek(7)
                raise ConnectionResetError("half way")
            return self.inner.read(size)

    class Store(StruckStore):
        def open_input(self, path: str) -> Any:
            nonlocal num_opened
            num_opened += 1
            return Breaking(self.store.open_input(path))

    fs = Filesystem(SteadyStore(Store(plain.store, lambda *call: None), QUICK), plain.root)
    with fs.open_input("shard") as file:
        found = b"".join(iter(lambda: file.read(500), b""))
        assert found == content
        assert num_opened > 3
        assert file.seek(-6, os.SEEK_END) == len(content) - 6
        assert file.read() == content[-6:]
        assert file.seek(10) == file.tell() == 10
        buffer = bytearray(4)
        assert file.readinto(buffer) == 4
        assert bytes(buffer) == content[10:14]


def test_a_file_that_was_not_finished_is_not_made(tmp_path: Path) -> None:
    """A store that makes an object when its stream is closed must not make half of one."""
    done = []

    class Stream:
        closed = False

        def write(self, data: bytes) -> int:
            return len(data)

        def close(self) -> None:
            done.append("made")

        def discard(self) -> None:
            done.append("discarded")

    class Store(StruckStore):
        def open_output(self, path: str) -> Any:
            return Stream()

    fs = Filesystem(SteadyStore(Store(ObjectStore("memory"), lambda *call: None), QUICK), "x")

    def out_of_memory() -> None:
        with fs.open_output("shard") as file:
            file.write(b"half")
            raise MemoryError

    with pytest.raises(MemoryError):
        out_of_memory()
    assert done == ["discarded"]
    with fs.open_output("shard") as file:
        file.write(b"whole")
    assert done == ["discarded", "made"]


def test_the_room_that_is_left(tmp_path: Path) -> None:
    free = Filesystem.at(f"{tmp_path}/not/there/yet").free_bytes()
    assert free is not None
    assert 0 < free < os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    assert Filesystem.at("memory://bucket").free_bytes() is None


def test_a_run_reads_as_it_did_through_one_that_fails(tmp_path: Path) -> None:
    catalog = make_run(tmp_path)
    add_checkpoint(catalog, 4)
    flaky = StruckStore(LocalStore(), once_each(TimeoutError("slow")))
    again = Catalog(Filesystem(SteadyStore(flaky, QUICK), str(tmp_path)), catalog.run_id)
    assert again.list() == catalog.list()
