"""Publishing a save: from the shards of all ranks to a complete checkpoint.

Done by whoever drives the run, in one place at a time: the driver under Ray, rank 0's process
without. Retention runs right after, and never before.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from elastic.policy.retention import Retention
from elastic.storage import retention
from elastic.storage.archiver import Archiver
from elastic.storage.checkpoints import Catalog, Manifest
from elastic.storage.suspects import why_suspect
from elastic.training.coordinator import Shard


@dataclass(frozen=True, kw_only=True)
class Published:
    """One commit, for the ledger."""

    step: int
    generation: int
    bytes: int
    path: str
    stall_s: float
    """The longest stall of a rank's training loop."""
    write_s: float
    """From the start of the save until the slowest rank's files were durable."""
    commit_s: float
    removed: Sequence[int]
    """Steps of the checkpoints that retention has removed after it."""

    def record(self) -> dict[str, object]:
        """What the ledger keeps of it."""
        return {
            "bytes": self.bytes,
            "path": self.path,
            "stall_s": self.stall_s,
            "write_s": self.write_s,
            "duration_s": self.write_s + self.commit_s,
        }


def publish(
    catalog: Catalog,
    shards: Sequence[Shard],
    keep: Retention,
    protected: Collection[int],
    archiver: Archiver | None = None,
) -> Published:
    """Commit the save that these shards, one of each rank, are the whole of.

    An older checkpoint of the same step gives way: the resumed history wins. What belongs in the
    archive stays until the archiver has taken it. Raises what `Catalog.commit` raises; then
    nothing was published.
    """
    one = shards[0]
    assert {shard.world_rank for shard in shards} == set(range(one.world_size)), shards
    begun_s = time.monotonic()
    manifest = Manifest(
        run_id=catalog.run_id,
        step=one.step,
        world_size=one.world_size,
        generation=one.generation,
        attempt=one.attempt,
        created_s=time.time(),
        counters=dict(one.counters),
        tensors={name: info for shard in shards for name, info in shard.tensors.items()},
        files=[file for shard in shards for file in shard.files],
    )
    doubts = functools.partial(why_suspect, catalog)
    done = catalog.commit(manifest, one.path, replace=True, doubts=doubts)
    protected = {done.step, *protected}
    if archiver is None:
        removed = retention.apply(catalog, keep, protected)
    else:
        removed = retention.apply(catalog, keep, protected, archiver.holding)
        archiver.wake()
    return Published(
        step=done.step,
        generation=one.generation,
        bytes=done.bytes,
        path=done.path,
        stall_s=max(shard.stall_s for shard in shards),
        write_s=max(shard.write_s for shard in shards),
        commit_s=time.monotonic() - begun_s,
        removed=removed,
    )
