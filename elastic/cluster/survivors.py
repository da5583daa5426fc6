"""Survivors: which workers go on in the next generation, and which are too many for its mesh."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.cluster.ray_internals import GroupMember
from elastic.policy.mesh import Mesh


def key(member: GroupMember) -> tuple[str, int]:
    """What tells a process from all others of the run, whatever its rank."""
    return member.node_id, member.pid


def to_end(
    gone: set[tuple[str, int]],
    leaving: list[GroupMember],
    mesh: Mesh,
    there: Sequence[GroupMember],
) -> set[int]:
    """Indices of the workers that do not go on: those that are gone, and those too many.

    The latter become `gone` and `leaving` before anyone ends them, so that their end passes for no
    death.
    """
    ended = {index for index, one in enumerate(there) if key(one) in gone}
    left = [index for index in range(len(there)) if index not in ended]
    for index in mesh.left_out([there[place].node_id for place in left]):
        spare = left[index]
        ended.add(spare)
        gone.add(key(there[spare]))
        leaving.append(there[spare])
    return ended
