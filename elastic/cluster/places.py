"""Places: what each rank of a generation is told of itself, its peers, and where to begin."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.cluster.ray_internals import GroupMember
from elastic.policy.coverage import Resume
from elastic.training.membership import Membership


def places(
    run_id: str, generation: int, members: Sequence[GroupMember], port: int, resume: Resume
) -> list[Membership]:
    """By world rank. The store of the generation is on rank 0's node, at that port."""
    return [
        Membership(
            run_id=run_id,
            generation=generation,
            world_rank=member.world_rank,
            world_size=member.world_size,
            local_rank=member.local_rank,
            local_world_size=member.local_world_size,
            node_rank=member.node_rank,
            store_host=members[0].node_ip,
            store_port=port,
            resume_step=resume.step,
            snapshot=resume.snapshot,
        )
        for member in members
    ]
