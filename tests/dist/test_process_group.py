"""Joining and leaving a generation: no port is chosen early, and nobody is asked on the way out."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic.policy.mesh import Mesh
from elastic.training import process_group
from elastic.training.group_sockets import GroupSockets
from elastic.training.membership import Membership
from tests.dist.processes import run_ranks


def member(rank: int, world_size: int, port: int, generation: int = 0) -> Membership:
    return Membership(
        run_id="run",
        generation=generation,
        world_rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        node_rank=0,
        store_host="127.0.0.1",
        store_port=port,
        resume_step=None,
    )


def test_a_port_that_is_taken_between_two_generations_is_not_missed():  # B77
    first = process_group.open_store("127.0.0.1")
    port = first.port
    del first
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        second = process_group.open_store("127.0.0.1")
        assert second.port != port
        client = dist.TCPStore("127.0.0.1", second.port, is_master=False, wait_for_workers=False)
        client.set("word", "heard")
        assert second.get("word") == b"heard"


def test_a_rank_of_an_older_generation_cannot_join():  # B77
    server = process_group.open_store("127.0.0.1")
    late = member(1, 2, server.port, generation=3)
    newer = dist.PrefixStore("generation-4", server)
    newer.add("here", 1)
    with pytest.raises(process_group.Superseded):
        process_group.connect(late, use_cuda=False, timeout_s=30.0, is_superseded=lambda: True)
    assert newer.add("here", 0) == 1


def test_ranks_of_two_generations_do_not_meet_on_one_store():  # B77
    server = process_group.open_store("127.0.0.1")
    for rank, generation in ((0, 4), (1, 3)):  # two of two, were they of one generation
        with pytest.raises(process_group.Superseded):
            process_group.connect(
                member(rank, 2, server.port, generation),
                use_cuda=False,
                timeout_s=5.0,
                is_superseded=lambda: True,
            )


def joined(rank: int, world_size: int, mesh: Mesh | None = None) -> process_group.Groups:
    """This rank in a group as a generation makes it, in place of the helper's."""
    server = process_group.open_store("127.0.0.1") if rank == 0 else None
    port = [server.port if server else 0]
    dist.broadcast_object_list(port, src=0)
    dist.destroy_process_group()
    return process_group.connect(
        member(rank, world_size, port[0]),
        use_cuda=False,
        timeout_s=50.0,
        mesh=mesh,
        server=server,
    )


def beside_a_standing_peer(rank: int, world_size: int, folder: str, how: str) -> float:
    """How long rank 0 needs to get away from rank 1, which is stopped by SIGSTOP meanwhile."""
    in_pairs = Mesh(shard=2) if how == "woken in a part of the mesh" else None
    groups = joined(rank, world_size, in_pairs)
    over = None if in_pairs is None else groups.mesh.get_group("shard")
    pid = Path(folder, how)
    if rank == 1:
        pid.with_suffix(".new").write_text(str(os.getpid()))
        pid.with_suffix(".new").rename(pid)
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank:
        return 0.0
    while not pid.exists():
        time.sleep(0.01)
    peer = int(pid.read_text())
    try:
        while Path(f"/proc/{peer}/stat").read_text().rsplit(") ", 1)[1][0] != "T":
            time.sleep(0.01)
        begun_s = time.monotonic()
        if how.startswith("woken"):
            threading.Timer(0.5, process_group.wake).start()
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.ones(1), group=over)
        else:
            dist.all_reduce(torch.ones(1), async_op=True)
        process_group.disconnect()
        return time.monotonic() - begun_s
    finally:
        os.kill(peer, signal.SIGKILL)


@pytest.mark.parametrize(
    ("how", "size"), [("woken", 2), ("leaves", 2), ("woken in a part of the mesh", 4)]
)
def test_a_peer_that_stands_still_holds_nobody(tmp_path: Path, how: str, size: int):  # B83
    took_s, *_ = run_ranks(beside_a_standing_peer, size, str(tmp_path), how, may_die={1})
    assert took_s < 3.0


def keeps_what_is_not_gloos(rank: int, world_size: int) -> tuple[int, bytes]:
    """How many sockets were found, and what a connection says that is opened at the same time."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        process_group._sockets = sockets = _OpensOneMore(server.getsockname())
        joined(rank, world_size)
        found = len(sockets)
        accepted, _ = server.accept()
        process_group.wake()
        accepted.sendall(b"still here")
        return found, sockets.another.recv(10)


class _OpensOneMore(GroupSockets):
    """Another part of the program connects to somewhere while the groups are made."""

    def __init__(self, address: Any) -> None:
        super().__init__()
        self._address = address

    def begin(self) -> None:
        super().begin()
        self.another = socket.create_connection(self._address)


def test_other_connections_of_the_process_stay():
    # Two peers in each of three groups.
    assert run_ranks(keeps_what_is_not_gloos, 3) == [(6, b"still here")] * 3


def beside_one_that_dies_while_joining(
    rank: int, world_size: int, victim: int, delay_s: float
) -> float:
    """How long the joining of a group takes of which a rank dies meanwhile; it may succeed."""
    server = process_group.open_store("127.0.0.1") if rank == 0 else None
    port = [server.port if server else 0]
    dist.broadcast_object_list(port, src=0)
    dist.barrier()
    dist.destroy_process_group()
    told = threading.Event()

    def strike() -> None:
        time.sleep(delay_s)
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.1)
        told.set()
        process_group.wake()

    threading.Thread(target=strike, daemon=True).start()
    begun_s = time.monotonic()
    with contextlib.suppress(RuntimeError, process_group.Superseded):
        process_group.connect(
            member(rank, world_size, port[0]),
            use_cuda=False,
            timeout_s=600.0,
            server=server,
            is_superseded=told.is_set,
        )
    took_s = time.monotonic() - begun_s
    process_group.disconnect()
    # What comes next is not disturbed by what was left behind.
    again = process_group.open_store("127.0.0.1")
    process_group.connect(member(0, 1, again.port, 1), use_cuda=False, timeout_s=9.0, server=again)
    dist.all_reduce(torch.ones(1))
    process_group.disconnect()
    return took_s


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.02])
def test_a_peer_that_dies_while_all_join_holds_nobody_for_long(victim: int, delay_s: float):  # B84
    took_s = run_ranks(beside_one_that_dies_while_joining, 3, victim, delay_s, may_die={victim})
    others = [took_s[rank] for rank in range(3) if rank != victim]
    assert max(others) < 8.0  # not the 600 s that a collective may take


def timeouts(rank: int, world_size: int) -> set[float]:
    """In seconds, of all groups of a mesh whose dimensions are smaller than the world, and not."""
    groups = joined(rank, world_size, Mesh(shard=1))
    of_mesh = groups.mesh.get_all_groups()
    assert [group.size() for group in of_mesh] == [2, 1]
    every = (dist.group.WORLD, groups.control, groups.saves, *of_mesh)
    cpu = torch.device("cpu")
    return {group._get_backend(cpu).options._timeout.total_seconds() for group in every}


def test_groups_of_a_mesh_have_the_timeout_asked_for():
    assert run_ranks(timeouts, 2) == [{50.0}, {50.0}]


def test_groups_have_the_timeout_asked_for_once_they_are_joined():
    server = process_group.open_store("127.0.0.1")
    groups = process_group.connect(
        member(0, 1, server.port), use_cuda=False, timeout_s=77.0, server=server
    )
    try:
        for group in (dist.group.WORLD, groups.control, groups.saves):
            backend = group._get_backend(torch.device("cpu"))
            assert backend.options._timeout.total_seconds() == 77.0
    finally:
        process_group.disconnect()
