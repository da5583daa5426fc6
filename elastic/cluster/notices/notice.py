"""A notice: somebody's word that this node is about to go; and what one can be had from.

Another cloud is one more `Source`. Azure's would ask its metadata address for `scheduledevents`
with the header `Metadata: true`, take an event of type Preempt, Reboot, Redeploy or Terminate that
names this machine among its `Resources`, and its `NotBefore` as the deadline; then
`elastic.cluster.notices.sources` gives it a name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Notice:
    """This node will go. Equal notices are the same one, heard again."""

    kind: str
    """Who says so: aws-spot, aws-rebalance, gcp-preempted, gcp-maintenance, file, sigterm, asked.
    """
    deadline_s: float | None
    """Wall time, in seconds since 1970, at which the node goes; None when that is not told."""
    text: str
    """For people."""


class Source(Protocol):
    """One thing that can say that this node will go."""

    @property
    def name(self) -> str:
        """As it is asked for, and as it is told of."""
        ...

    @property
    def interval_s(self) -> float:
        """How long to wait between two questions."""
        ...

    def poll(self) -> Notice | None:
        """The notice that stands now, equal to the one given before when it is the same.

        May raise anything when the source cannot be asked or understood: that is no notice, and it
        is asked again.
        """
        ...
