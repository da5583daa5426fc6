"""The arguments of `jobs.pretrain`: parsed, and all checked before any worker starts."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

from elastic.cluster import own_page
from elastic.cluster.notices.sources import checked
from elastic.importing import collector_paused
from elastic.policy.durations import parse_duration_s
from elastic.policy.hangs import HangLimits
from elastic.policy.mesh import Mesh
from elastic.policy.saves import AUTO, SaveInterval
from elastic.storage.claim import recorded_tiers, run_url

DEFAULT_STORAGE = Path("~/elastic-runs").expanduser()
OPTIMIZERS = ("adamw", "sgd")


def parser(description: str | None) -> argparse.ArgumentParser:
    """Its flags; storage, data and sizes are checked later, all together."""
    found = argparse.ArgumentParser(prog="python -m jobs.pretrain", description=description)
    found.add_argument("--name", help="the run; the same name resumes (default: a new one)")
    found.add_argument(
        "--storage", default=None, help=f"path or URL for all runs (default {DEFAULT_STORAGE})"
    )
    found.add_argument("--data", help="text or Parquet (default: Python's library)")
    found.add_argument("--steps", type=int, default=200, help="optimizer steps in all")
    found.add_argument(
        "--num-workers",
        default="1:2",
        metavar="N|MIN:MAX",
        help="with a range it goes on with what is left (default 1:2)",
    )
    found.add_argument(
        "--shard",
        type=int,
        metavar="N",
        help="workers that hold one copy of the state, replicated by all others (default: all)",
    )
    found.add_argument("--global-batch", type=int, default=32, help="samples per step")
    found.add_argument("--micro-batch", type=int, default=8, help="samples per forward")
    found.add_argument("--sequence-length", type=int, default=128, help="tokens per sample")
    found.add_argument("--model", default="tiny", help="model preset")
    found.add_argument("--dropout", type=float, default=0.0)
    found.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    found.add_argument("--lr", type=float, default=1e-3)
    found.add_argument("--warmup-steps", type=int, default=20)
    found.add_argument("--seed", type=int, default=0)
    _add_saving(found)
    found.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    found.add_argument("--max-failures", type=int, default=0, help="restarts for exceptions")
    found.add_argument("--grow-interval", type=float, default=60.0, metavar="SECONDS")
    found.add_argument("--wait-for-capacity", type=float, default=300.0, metavar="SECONDS")
    found.add_argument(
        "--accept-change",
        action="append",
        default=[],
        metavar="FIELD",
        help="resume although this field differs from what the run was begun with",
    )
    found.add_argument("--from-step", type=int, metavar="N", help="go back to this checkpoint")
    found.add_argument("--fresh", action="store_true", help="a new run NAME-2 if there is NAME")
    found.add_argument(
        "--load-from", metavar="PATH", help="weights to begin with: a run, a checkpoint, DCP"
    )
    found.add_argument(
        "--trust-foreign", action="store_true", help="whoever can write to --load-from is trusted"
    )
    _add_suspicions(found)
    found.add_argument("--json", metavar="PATH", help="write the summary here")
    found.add_argument("--quiet", action="store_true", help="no progress lines")
    return found


def _add_suspicions(found: argparse.ArgumentParser) -> None:
    """Flags for what ranks and nodes are taken to have, though they do not say so."""
    found.add_argument(
        "--hang-limit",
        default="5min",
        metavar="DURATION",
        help="a step that takes longer is a hang, unless others were as slow; none: never",
    )
    found.add_argument(
        "--node-strikes",
        type=int,
        default=3,
        metavar="N",
        help="failures within an hour after which a node is kept out; 0: never (default 3)",
    )
    _add_notices(found)


def _add_saving(found: argparse.ArgumentParser) -> None:
    found.add_argument(
        "--save-every",
        default=AUTO,
        help="auto (default) computes it from what the run measures; or such as 20steps or 60s",
    )
    found.add_argument(
        "--mtbf",
        metavar="TIME",
        help="for auto: what you believe of the time between failures: hours, 8h (default), 30min",
    )
    found.add_argument("--save-behind", choices=("skip", "wait"), default="skip")
    found.add_argument(
        "--snapshot-every",
        type=int,
        metavar="STEPS",
        help="keep a snapshot in the nodes' memories every so many steps (default: none)",
    )
    found.add_argument(
        "--no-snapshots",
        dest="snapshot_every",
        action="store_const",
        const=None,
        help="keep none, whatever was said before",
    )
    found.add_argument("--keep", type=int, default=3, help="newest checkpoints to keep; -1 all")
    found.add_argument("--keep-every", type=int, help="also keep steps divisible by this")
    found.add_argument(
        "--archive", metavar="URL", help="copy those there, and keep them in the storage no longer"
    )
    found.add_argument(
        "--local",
        metavar="DIR",
        help="on each node's own disk: saves go there first, and to the storage beside training",
    )


def _add_notices(found: argparse.ArgumentParser) -> None:
    found.add_argument(
        "--notices",
        action="append",
        metavar="SOURCE",
        help="what says that a node will be taken: auto (default), none, aws, aws-rebalance, gcp, "
        "file:PATH; repeatable",
    )
    found.add_argument(
        "--page",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="where the run serves its page, on the driver's node (default 127.0.0.1:0, which "
        f"takes a free port), or none; other than loopback addresses need {own_page.TOKEN}",
    )


class InvalidInput(ValueError):
    """Arguments that cannot work; the message says what to do."""


def parse_workers(text: str) -> int | tuple[int, int]:
    """`"3"` to 3, `"2:4"` to (2, 4).

    Raises:
        InvalidInput: it is neither, or names no possible group.
    """
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    if found is None:
        raise InvalidInput(f"--num-workers is N or MIN:MAX, such as 2 or 2:4; found {text!r}")
    low, high = int(found[1]), int(found[2] or found[1])
    if low < 1 or high < low:
        raise InvalidInput(
            f"--num-workers needs at least 1 worker and MIN not above MAX; found {text!r}"
        )
    return low if found[2] is None else (low, high)


def check(arguments: argparse.Namespace) -> tuple[dict[str, Any], int | tuple[int, int]]:
    """The training function's configuration and the number of workers, all checked.

    Raises:
        InvalidInput: something cannot work.
    """
    from jobs.text import prepare

    with collector_paused():
        from jobs.model import PRESETS

    num_workers = parse_workers(arguments.num_workers)
    smallest = num_workers if isinstance(num_workers, int) else num_workers[0]
    if arguments.node_strikes < 0:
        raise InvalidInput(f"--node-strikes must be at least 0; found {arguments.node_strikes}")
    for name in ("steps", "global_batch", "micro_batch", "sequence_length", "warmup_steps"):
        if getattr(arguments, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise InvalidInput(f"{flag} must be at least 1; found {getattr(arguments, name)}")
    if arguments.global_batch < smallest:
        raise InvalidInput(
            f"--global-batch {arguments.global_batch} gives less than one sample to each of "
            f"{smallest} workers, the smallest group asked for: raise --global-batch to at least "
            f"{smallest}, or lower --num-workers"
        )
    if arguments.model not in PRESETS:
        raise InvalidInput(f"--model is one of {', '.join(PRESETS)}; found {arguments.model!r}")
    _check_trust(arguments)
    _check_values(arguments)
    try:
        text = prepare(
            arguments.data,
            sequence_length=arguments.sequence_length,
            min_samples=arguments.global_batch,
        )
    except ValueError as error:
        raise InvalidInput(str(error)) from error
    model = {**vars(PRESETS[arguments.model]), "dropout": arguments.dropout}
    model["vocab_size"] = text.vocab_size
    config = {
        "data": text.data,
        "data_identity": text.identity,
        "model": model,
        **{
            name: getattr(arguments, name)
            for name in (
                "steps",
                "global_batch",
                "micro_batch",
                "sequence_length",
                "optimizer",
                "lr",
                "warmup_steps",
                "dtype",
            )
        },
    }
    return config, num_workers


def _check_values(arguments: argparse.Namespace) -> None:
    """Raises `InvalidInput` for what can only be read wrongly."""
    hang_limits(arguments)
    mtbf_s(arguments)
    mesh(arguments)
    try:
        SaveInterval.parse(arguments.save_every)
        checked(arguments.notices or "auto")
        own_page.checked(arguments.page, os.environ)
    except ValueError as error:
        raise InvalidInput(str(error)) from error


def hang_limits(arguments: argparse.Namespace) -> HangLimits | None:
    """The limits that `--hang-limit` asks for.

    Raises:
        InvalidInput: it is no duration.
    """
    if arguments.hang_limit == "none":
        return None
    try:
        return HangLimits(step_s=parse_duration_s(arguments.hang_limit, bare_unit="s"))
    except ValueError as error:
        raise InvalidInput(f"--hang-limit: {error}") from error


def mesh(arguments: argparse.Namespace) -> Mesh:
    """How `--shard` lays the workers out.

    Raises:
        InvalidInput: no group can be so.
    """
    try:
        return Mesh(shard=arguments.shard)
    except ValueError as error:
        raise InvalidInput(f"--shard: {error}") from error


def mtbf_s(arguments: argparse.Namespace) -> float | None:
    """The prior that `--mtbf` gives, in seconds; a bare number is in hours.

    Raises:
        InvalidInput: it is no duration.
    """
    if arguments.mtbf is None:
        return None
    try:
        return parse_duration_s(arguments.mtbf, bare_unit="h")
    except ValueError as error:
        raise InvalidInput(f"--mtbf: {error}") from error


def _check_trust(arguments: argparse.Namespace) -> None:
    if arguments.load_from and not arguments.trust_foreign:
        raise InvalidInput(
            f"--load-from {arguments.load_from} was not written by this run: add --trust-foreign "
            "if everybody who can write there may decide what the model begins with"
        )


def check_places(arguments: argparse.Namespace, storage: str) -> None:
    """Raises `InvalidInput` for a run directory, a --local or an --archive that cannot be one."""
    name = arguments.name or "a-run"
    try:
        run_url(storage, name)
        recorded_tiers(
            storage,
            name,
            local=arguments.local,
            archive=arguments.archive,
            keep_every=arguments.keep_every,
        )
    except ValueError as error:
        raise InvalidInput(str(error)) from error


def identity_of(config: dict[str, Any]) -> dict[str, Any]:
    """What makes this the same run again; where the data lies and how long to train do not."""
    operational = ("steps", "micro_batch", "data")
    return {key: value for key, value in config.items() if key not in operational}


def storage_of(arguments: argparse.Namespace) -> str:
    """Where runs go: an absolute path or URL, never a folder that a job would ship.

    Raises:
        InvalidInput: relative, or inside the working directory.
    """
    storage = str(arguments.storage or DEFAULT_STORAGE)
    if "://" in storage and not storage.startswith("file://"):
        return storage
    path = Path(storage.removeprefix("file://"))
    if not path.is_absolute():
        raise InvalidInput(
            f"--storage must be an absolute path or a URL; found {storage!r}. A relative path "
            f"means another place on every node: use {path.absolute()} if all nodes share it"
        )
    if Path.cwd() != Path("/") and path.resolve().is_relative_to(Path.cwd().resolve()):
        raise InvalidInput(
            f"--storage {storage} lies inside the working directory {Path.cwd()}, which a job "
            "ships to the cluster: choose a place outside it"
        )
    return str(path)
