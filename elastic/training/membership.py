"""What one rank is told about the generation it belongs to. Plain data, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from elastic.policy.coverage import Snapshot
from elastic.policy.mesh import Mesh
from elastic.policy.saves import SaveInterval


@dataclass(frozen=True, kw_only=True)
class Membership:
    """A rank's place in one generation, as the driver decided it."""

    run_id: str
    generation: int
    world_rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    store_host: str
    store_port: int
    resume_step: int | None
    """The checkpoint that all ranks restore; None starts at step 0."""
    snapshot: Snapshot | None = None
    """What is restored in place of the checkpoint of that step, from the nodes' memories."""

    def __post_init__(self) -> None:
        assert 0 <= self.world_rank < self.world_size, self
        assert 0 <= self.local_rank < self.local_world_size, self


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """What is the same for every rank and every generation of a run."""

    run_url: str
    """Root of the run directory: an absolute path or a URL."""
    config: dict[str, Any] = field(default_factory=dict)
    """The user's own, handed to the training function as `run.config`."""
    seed: int = 0
    save: SaveInterval = SaveInterval()
    mtbf_s: float | None = None
    """Where `save` is computed: the owner's mean time between failures; None takes the default."""
    save_behind: str = "skip"
    """What to do when a save is due while one is being written: `skip` (and count) or `wait`."""
    max_save_failures: int = 3
    """Failed saves in a row after which the run fails."""
    snapshot_every: int | None = None
    """Steps from one snapshot in the nodes' memories to the next; None takes none."""
    collective_timeout_s: float = 1800.0
    commit_timeout_s: float = 600.0
    use_cuda: bool = False
    mesh: Mesh = field(default_factory=Mesh)
    """How the ranks are laid out, at any world size."""
    accept_changes: tuple[str, ...] = ()
    """Fields that may differ from those the run was begun with: `global_batch` counts."""
    load_from: str | None = None
    """Where the model's weights come from when the run is at step 0; None leaves them as built."""
    local: str | None = None
    """A directory on each node's own disk, to which saves are written first; None: none."""

    def __post_init__(self) -> None:
        if self.save_behind not in ("skip", "wait"):
            raise ValueError(f"save_behind is 'skip' or 'wait'; found {self.save_behind!r}")
        if self.max_save_failures < 1:
            raise ValueError(f"max_save_failures is at least 1; found {self.max_save_failures}")
        if self.mtbf_s is not None and not 0 < self.mtbf_s < math.inf:
            raise ValueError(f"mtbf_s must be above 0 and finite; found {self.mtbf_s}")
        if self.snapshot_every is not None and self.snapshot_every < 1:
            raise ValueError(f"snapshot_every is at least 1 step; found {self.snapshot_every}")
        for name in ("collective_timeout_s", "commit_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0; found {getattr(self, name)}")
