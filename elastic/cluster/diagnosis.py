"""A look at every rank of a group that stands still, and the stacks of all, kept with the run."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.cluster.node_agent import NO_STACKS, ProcessLook
from elastic.cluster.node_agents import NodeAgents, pids_by_node
from elastic.cluster.ray_internals import GroupMember
from elastic.policy.culprits import RankLook
from elastic.storage.filesystem import Filesystem
from elastic.storage.stacks import stacks_path

logger = logging.getLogger("elastic")

_ANSWER_S = 0.75
_KEEP_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What was seen, and where the stacks lie in the run directory, if they could be kept."""

    looks: Sequence[RankLook]
    stacks: str


async def diagnose(
    members: Sequence[GroupMember],
    phases: Mapping[int, str],
    *,
    ask: Callable[[], Any],
    agents: NodeAgents,
    filesystem: Filesystem,
    generation: int,
) -> Diagnosis:
    """Look at all ranks at once. Takes about a second when one of them does not answer.

    `ask` gives a reference to each rank's own answer (`worker.look_at_self`).
    """
    references = await ask()
    told, seen = await asyncio.gather(
        asyncio.gather(*[_answer(reference) for reference in references]),
        _from_outside(members, agents),
    )
    looks, texts = [], {}
    for member, own in zip(members, told, strict=True):
        rank = member.world_rank
        outside = seen.get((member.node_id, member.pid), ProcessLook(state="", stacks=""))
        look = own[0] if own else RankLook(world_rank=rank, phase=phases[rank], answers=False)
        looks.append(dataclasses.replace(look, process_state=outside.state))
        texts[rank] = _stacks(outside, own[1] if own else "")
    kept = await _keep(filesystem, generation, texts)
    return Diagnosis(looks=looks, stacks=kept)


async def _answer(reference: Any) -> tuple[RankLook, str] | None:
    try:
        answer: tuple[RankLook, str] = await asyncio.wait_for(reference, _ANSWER_S)
        return answer
    except Exception:  # noqa: BLE001 - no answer, for whatever reason, is what was asked for
        return None


async def _from_outside(
    members: Sequence[GroupMember], agents: NodeAgents
) -> dict[tuple[str, int], ProcessLook]:
    by_node = pids_by_node(members)
    answers = await asyncio.gather(*[agents.look(node, pids) for node, pids in by_node.items()])
    return {
        (node, pid): look
        for node, looks in zip(by_node, answers, strict=True)
        for pid, look in looks.items()
    }


def _stacks(outside: ProcessLook, own: str) -> str:
    if own and (not outside.stacks or outside.stacks.startswith(NO_STACKS)):
        return own
    return outside.stacks or f"{NO_STACKS}: neither the process nor its node's agent answered\n"


async def _keep(filesystem: Filesystem, generation: int, texts: Mapping[int, str]) -> str:
    """Not for long: it may be the storage that stands still."""
    number = int(time.time())

    def write() -> None:
        for rank, text in texts.items():
            filesystem.write_bytes(stacks_path(generation, number, rank), text.encode())

    try:
        await asyncio.wait_for(asyncio.to_thread(write), _KEEP_S)
    except Exception as error:  # noqa: BLE001 - storage clients raise classes of their own
        logger.warning("the stacks could not be kept: %r", error)
        return ""
    return stacks_path(generation, number)
