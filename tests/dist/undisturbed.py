"""`jobs.pretrain` on gloo ranks that nothing happens to: the curve that other runs must have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from elastic.policy.retention import Retention
from elastic.policy.saves import SaveInterval
from elastic.storage.claim import RunSpec
from elastic.training.membership import TrainingConfig
from elastic.training.standalone import train_standalone
from jobs import pretrain
from jobs.pretrain_arguments import check, parser
from jobs.report import summary
from tests.dist.processes import run_ranks
from tests.dist.standalone_run import own_store


def undisturbed(world_size: int, storage: Path, *flags: str) -> dict[str, Any]:
    """The summary of a whole run with these flags, which lies in `storage`/undisturbed."""
    url = str(storage / "undisturbed")
    run_ranks(_rank, world_size, url, flags, timeout_s=100)
    return summary(url)


def _rank(rank: int, world_size: int, url: str, flags: tuple[str, ...]) -> None:
    arguments = parser(None).parse_args([*flags, "--num-workers", str(world_size)])
    config, _ = check(arguments)
    train_standalone(
        pretrain.train,
        TrainingConfig(
            run_url=url,
            config=config,
            seed=arguments.seed,
            save=SaveInterval.parse(arguments.save_every),
            save_behind=arguments.save_behind,
        ),
        RunSpec(name="undisturbed", seed=arguments.seed),
        Retention(keep=-1),
        world_rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        store=own_store(rank),
    )
