"""The keeper of a node's snapshots: what it holds, for how long, and from whom it takes more.

Without a cluster: what it does with another keeper is in test_memory_tier.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.cluster.segment import MapStream, Place, machine, map_place, open_place
from elastic.cluster.snapshot_keeper import Refused, SnapshotKeeper
from elastic.policy.coverage import SLOTS, Piece, Unneeded
from elastic.storage.chunk_digests import ChunkDigester, chunk_problem

OWN = os.getpid()


def piece(step: int, *, generation: int = 0) -> Piece:
    return Piece(generation=generation, step=step, world_rank=0, world_size=1)


def keep(keeper: SnapshotKeeper, made: Piece, data: bytes, unneeded: Unneeded) -> Place:
    place = room(keeper, made.generation, len(data), unneeded)
    assert place is not None
    map_place(place)[: len(data)] = data
    keeper.seal(OWN, place, made, len(data), b"index", None, unneeded)
    return place


def room(
    keeper: SnapshotKeeper, generation: int, num_bytes: int, unneeded: Unneeded
) -> Place | None:
    """As a rank chooses among its segments."""
    rooms = keeper.rooms(OWN, generation, num_bytes, unneeded)
    assert len(rooms) == SLOTS
    free = [place for place, piece in rooms if piece is None or unneeded.has(piece)]
    return free[0] if free else None


def test_what_was_sealed_is_there_with_its_digests() -> None:
    keeper = SnapshotKeeper()
    data = os.urandom(100_000)
    keep(keeper, piece(2), data, Unneeded())
    assert keeper.open(0) == [piece(2)]
    found = keeper.describe(piece(2))
    assert found.index == b"index" and chunk_problem(found.digests, 0, data) == ""
    with open_place(found.place) as file:
        assert file.read(len(data)) == data
    assert keeper.read(piece(2), 10, 20).tobytes() == data[10:30]


def test_two_places_are_used_in_turn_and_the_whole_one_is_never_written_to() -> None:
    keeper = SnapshotKeeper()
    unneeded, places = Unneeded(), []
    for step in range(2, 14, 2):
        places.append(keep(keeper, piece(step), bytes([step]) * 1000, unneeded))
        assert piece(step - 2) in keeper.open(0) or step == 2  # B08: whole until the next is
        unneeded = Unneeded(whole=piece(step))
    assert len(set(places)) == 2
    for _ in range(3):  # they fail: each takes the place of the one before
        places.append(keep(keeper, piece(14), b"x", unneeded))
        unneeded = Unneeded(whole=unneeded.whole, failed=piece(14))
        assert piece(12) in keeper.open(0)
    assert len(set(places)) == 2
    assert room(keeper, 0, 10, Unneeded(whole=piece(12))) is None


def test_pieces_that_have_grown_find_room_once_the_smaller_one_is_unneeded() -> None:
    """As in a group that goes on with fewer ranks, each of which holds more."""
    keeper = SnapshotKeeper()
    small, large = 1000, 1_000_000
    keep(keeper, piece(2), b"a" * small, Unneeded())
    assert room(keeper, 1, large, Unneeded()) is not None
    keep(keeper, piece(4, generation=1), b"b" * large, Unneeded())
    assert keeper.open(1) == [piece(2), piece(4, generation=1)], "it is whole until the next is"
    unneeded = Unneeded(whole=piece(4, generation=1))
    keep(keeper, piece(6, generation=1), b"c" * large, unneeded)
    assert keeper.open(1) == [piece(4, generation=1), piece(6, generation=1)]


def test_an_older_generation_can_put_nothing_into_it() -> None:
    keeper = SnapshotKeeper()
    keep(keeper, piece(2), b"x", Unneeded())
    place = room(keeper, 0, 10, Unneeded())  # given, and not yet filled
    assert keeper.open(1) == [piece(2)]
    for attempt in (
        lambda: keeper.rooms(OWN, 0, 10, Unneeded()),
        lambda: keeper.seal(OWN, place, piece(4), 1, b"", None, Unneeded()),
        lambda: keeper.begin_copy(piece(4), 10, Unneeded()),
    ):
        with pytest.raises(Refused, match="generation 0 was replaced by generation 1"):
            attempt()
    keep(keeper, piece(3, generation=1), b"y", Unneeded())
    keeper.keep_only((0, 2))
    assert keeper.open(1) == [piece(2), piece(3, generation=1)]
    keeper.keep_only(None)
    assert keeper.open(1) == [piece(3, generation=1)]


def test_a_copy_counts_once_all_of_it_has_come() -> None:
    import numpy as np

    keeper = SnapshotKeeper()
    data = np.frombuffer(os.urandom(5000), dtype=np.uint8)
    digester = ChunkDigester()
    digester.update(data)
    keeper.begin_copy(piece(2), 5000, Unneeded())
    keeper.receive(piece(2), 3000, data[3000:])
    keeper.receive(piece(2), 0, data[:3000])
    assert keeper.open(0) == []
    keeper.end_copy(piece(2), b"index", digester.file("copy"))
    assert keeper.open(0) == [piece(2)]
    assert keeper.read(piece(2), 0, 5000).tobytes() == data.tobytes()


def test_what_cannot_fit_is_said_with_both_numbers() -> None:
    keeper = SnapshotKeeper()
    assert keeper.check(1 << 20) == ""
    needed = 1 << 50
    assert keeper.check(needed).startswith("snapshots need 1125899.91 GB of memory, found ")
    keeper.rooms(OWN, 0, 1 << 20, Unneeded())
    told = keeper.check(1 << 20, needed)  # what it holds already is no room for saves
    assert "0.00 GB of memory, saves 1125899.91 GB more, found " in told


NUM_BYTES = (8 << 20) + 5000
NO_ADMINISTRATOR = ["setpriv", "--bounding-set=-sys_admin"] if os.geteuid() == 0 else []
NONE_MORE = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
NO_NAMESPACES = ["unshare", "-U", "-r", "sh", "-c", NONE_MORE, "-"]
PAGES = f"""
import os
from pathlib import Path
from elastic.cluster.segment import Segment, stream_place
segment = Segment({NUM_BYTES})
print(segment.place.is_large)
(part,) = Path("/proc/self/smaps").read_text().split("elastic-snapshot")[1:]
print(part.split("ShmemPmdMapped:", 1)[1].split("\\n", 1)[0].strip())
segment.view[-5:] = b"hello"
with stream_place(segment.place) as stream:
    found = bytearray({NUM_BYTES})
    print(stream.readinto(found) == {NUM_BYTES} and found.endswith(bytes(1) + b"hello"))
segment.close()
del stream
print(Path("/proc/self/maps").read_text().count("elastic-snapshot"))
"""


@pytest.mark.parametrize(
    ("prefix", "needs", "is_large"),
    [
        pytest.param([], ["unshare", "-m"], True, id="administrator"),
        pytest.param(NO_ADMINISTRATOR, ["unshare", "-U", "-r", "-m"], True, id="namespace"),
        pytest.param(NO_NAMESPACES, [], False, id="neither"),
    ],
)
def test_memory_lies_in_large_pages_wherever_they_can_be_had(
    prefix: list[str], needs: list[str], is_large: bool
) -> None:
    """Whatever the machine gives to a memfd, which is none unless its owner has changed that."""
    if shutil.which("unshare") is None or run([*prefix, *needs, "true"]).returncode:
        pytest.skip(f"not allowed here: {' '.join([*prefix, *needs])}")
    ran = run([*prefix, sys.executable, "-c", PAGES])
    told, in_large_pages, whole, left = ran.stdout.splitlines()
    assert told == str(is_large), ran.stderr
    large_bytes = NUM_BYTES >> 21 << 21 if is_large or memfd_is_in_large_pages() else 0
    assert in_large_pages == f"{large_bytes >> 10} kB"
    assert whole == "True"
    assert left == "0", "maps of it"


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def memfd_is_in_large_pages() -> bool:
    choice = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return choice.exists() and any(f"[{on}]" in choice.read_text() for on in ("advise", "always"))


PROGRAM = """
import sys, os, signal
from elastic.cluster.segment import Segment
segment = Segment(1 << 20)
segment.view[:5] = b"hello"
print(segment.place.path, segment.place.identity, flush=True)
sys.stdin.read()
"""


def test_memory_is_gone_with_its_owner_and_whoever_maps_it_keeps_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        path, identity = owner.stdout.readline().split()
        place = Place(machine(), path, identity, 1 << 20)
        for other, why in (
            (replace(place, identity="1-1"), "another file"),
            (replace(place, machine="other"), "another machine"),
        ):
            with pytest.raises(OSError, match=why):
                open_place(other)
        found, opened = map_place(place), open_place(place)
        owner.kill()
    assert found[:5] == b"hello"
    with MapStream(found) as stream:
        stream.seek((1 << 20) - 3)
        assert stream.take(5) is None
        assert stream.read(5) == bytes(3), "the end of it"
        stream.seek(0)
        assert stream.take(5) == b"hello"
        assert stream.read(1) == bytes(1)
    with opened:
        assert opened.read(5) == b"hello"
    with pytest.raises(OSError):
        map_place(place)
    assert not [path for path in Path("/dev/shm").iterdir() if "elastic" in path.name]
