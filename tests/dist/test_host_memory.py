"""Host memory: what saves will take is known before the first step, and a node without it told."""

from __future__ import annotations

import pickle
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elastic.training import saves
from elastic.training.host_memory import (
    HostMemoryShort,
    available_bytes,
    check_host_memory,
    growth_bytes,
    staging_bytes,
)
from elastic.training.saving import AsyncSaver
from elastic.training.state import TrackedState
from tests.dist import standalone_run
from tests.dist.processes import RankFailed, run_ranks

OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    (torch.optim.Adagrad, {}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_the_state_to_come_is_counted_before_the_first_step(
    kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    model = nn.Sequential(nn.Linear(300, 500), nn.Linear(500, 300)).to(torch.float32)
    optimizer = kind(model.parameters(), **options)
    tracked = TrackedState(model=model, optimizer=optimizer)
    expected = staging_bytes(tracked.capture().tensors, tracked.optimizers, 0)
    model(torch.ones(300)).sum().backward()
    optimizer.step()
    found = staging_bytes(tracked.capture().tensors, tracked.optimizers, 0)
    assert found == pytest.approx(expected, rel=0.02)
    saver = AsyncSaver()
    saver.reserve(expected)
    before = saver._stager._block if saver.held_bytes else None
    assert not saver._stager.stage(tracked.capture().tensors, 0).problem
    assert saver._stager._block is before


def test_counting_calls_no_hook_that_people_have_on_every_step() -> None:
    calls: list[Any] = []
    hook = register_optimizer_step_pre_hook(lambda *told: calls.append(told))
    try:
        model = nn.Linear(30, 50)
        optimizer = torch.optim.AdamW(model.parameters())
        assert growth_bytes([optimizer])[0] > 2 * 30 * 50 * 4
    finally:
        hook.remove()
    assert calls == []


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {}, 8 << 20),
        (
            "0::/pod/box\n",
            {
                "pod/memory.max": "5000000\n",
                "pod/memory.current": "4000000\n",
                "pod/memory.stat": "anon 1\ninactive_file 200000\n",
                "pod/box/memory.max": "max\n",
                "pod/box/memory.current": "1\n",
            },
            1_200_000,
        ),
        (
            "4:memory:/box\n1:cpu:/\n0::/\n",
            {
                "memory/box/memory.limit_in_bytes": "3000000\n",
                "memory/box/memory.usage_in_bytes": "1000000\n",
            },
            2_000_000,
        ),
    ],
)
def test_what_is_free_is_the_least_of_system_and_control_groups(
    tmp_path: Path, cgroup: str, files: dict[str, str], expected: int
) -> None:
    write(tmp_path, "proc/meminfo", "MemTotal: 9 kB\nMemAvailable:    8192 kB\n")
    write(tmp_path, "proc/self/cgroup", cgroup)
    for name, text in files.items():
        write(tmp_path, f"sys/fs/cgroup/{name}", text)
    assert available_bytes(tmp_path) == expected
    assert available_bytes() > 0


def two_nodes(rank: int, world_size: int, found_bytes: int) -> str:
    assert dist.group.WORLD is not None
    try:
        # Ranks 1 and 2 share a node.
        check_host_memory(1000, (rank + 1) // 2, dist.group.WORLD, found_bytes)
    except HostMemoryShort as error:
        return str(pickle.loads(pickle.dumps(error)))
    return ""


def test_the_ranks_of_a_node_are_counted_together() -> None:
    assert run_ranks(two_nodes, 3, 2000) == [""] * 3
    told = run_ranks(two_nodes, 3, 1999)
    assert len(set(told)) == 1
    assert f"node 1, {socket.gethostname()}" in told[0] and "2 ranks" in told[0]


def short_of_memory(rank: int, world_size: int, recipe: standalone_run.Recipe) -> None:
    saves.available_bytes = lambda: 10
    standalone_run._rank(rank, world_size, recipe)


def test_a_run_that_could_never_save_does_not_begin(tmp_path: Path) -> None:
    recipe = standalone_run.Recipe(root=str(tmp_path), until=2)
    with pytest.raises(RankFailed, match=r"HostMemoryShort: node 0, .* has too little host memory"):
        run_ranks(short_of_memory, 2, recipe)
    assert not list(tmp_path.rglob("*.distcp"))
