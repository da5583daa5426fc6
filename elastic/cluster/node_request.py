"""A node request: what is wanted of the node that this command runs on.

Performed by `elastic.cluster.node_program`. Must import neither ray nor torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class NodeRequest:
    """To watch over the node for as long as the command runs, or to drain it now."""

    address: str | None
    """`host:port` of the cluster's control store; None: looked for on this machine."""
    node_id: str
    """Empty: the one node of this machine."""
    grace_s: float
    """How long the node may take to be left once it is to go."""
    as_json: bool
    reason: str | None = None
    """Drain now, for this reason; None: watch."""
    sources: Sequence[str] = ()
    """What says that the node will go, by name."""
    command: Sequence[str] = ()
    """A program to run meanwhile, and to end after the node was left."""

    def to_json(self) -> str:
        """Text for a command line, from which `from_json` makes it again."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> NodeRequest:
        """The request again."""
        return cls(**json.loads(text))
