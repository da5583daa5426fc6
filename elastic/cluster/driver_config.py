"""What the driver is told at its birth."""

from __future__ import annotations

from dataclasses import dataclass

from elastic.policy.hangs import HangLimits
from elastic.policy.retention import Retention
from elastic.policy.situation import Rules
from elastic.storage.claim import RunSpec


@dataclass(frozen=True, kw_only=True)
class DriverConfig:
    """The run as it was asked for, checked by the trainer."""

    run_url: str
    spec: RunSpec
    rules: Rules
    keep: Retention
    resources_per_worker: dict[str, float]
    label_selector: dict[str, str] | None = None
    mix_accelerators: bool = False
    hangs: HangLimits | None = None
    """None: nothing is taken for a hang."""
    notices: tuple[str, ...] = ()
    """The sources that say that a node will be taken: see `elastic.cluster.notices.sources`."""
    from_scratch: bool = False
    """Checkpoints of an earlier history may be left alone, and the run start at step 0."""
    from_step: int | None = None
    """Go on from this complete checkpoint; newer ones are set aside."""
