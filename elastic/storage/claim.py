"""Claiming a run: the lease first, then the run file, made or found to be of the same run.

Identity fields must match, or be accepted by name; operational ones change freely. Must not import
ray or torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.storage.archive import check_archive
from elastic.storage.filesystem import Filesystem
from elastic.storage.lease import Lease, acquire
from elastic.storage.local_tier import check_local
from elastic.storage.redaction import redacted
from elastic.storage.run_file import (
    RUN_FILE,
    Difference,
    RunFile,
    create_run_file,
    differences,
    load_run_file,
    update_run_file,
)

# Keys of the training function's configuration that a resumed run may change freely.
OPERATIONAL = ("steps", "until", "epochs", "num_workers", "log_every", "eval_every", "save_every")


def run_url(storage_path: str, name: str) -> str:
    """The run's directory, as an absolute path or a URL.

    Raises:
        ValueError: the name is not one path component, or the storage no absolute place.
    """
    if not name or name in (".", "..") or any(part in name for part in ("/", "\\", "\0")):
        raise ValueError(f"a run's name is one path component, without slashes; found {name!r}")
    url = f"{storage_path.rstrip('/')}/{name}"
    Filesystem.at(url)
    return url


def recorded_tiers(
    storage_path: str, name: str, *, local: str | None, archive: str | None, keep_every: int | None
) -> dict[str, str]:
    """Operational fields of a run: its local tier, and its own directory in the archive.

    Those that are not asked for are left out. Raises `ValueError` for a place that cannot be one.
    """
    check_local(local, storage_path)
    check_archive(archive, storage_path, keep_every)
    found = {} if local is None else {"local": local}
    return found if archive is None else {**found, "archive": run_url(archive, name)}


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """A run as it was asked for; the mappings hold JSON values."""

    name: str
    seed: int
    config: Mapping[str, Any] = field(default_factory=dict)
    identity: Mapping[str, Any] = field(default_factory=dict)
    operational: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    accepted: Sequence[str] = ()
    """Identity fields that may differ from those the run was begun with; a field stands for all
    below it."""

    @classmethod
    def of(
        cls,
        *,
        name: str,
        seed: int,
        config: Mapping[str, Any],
        identity: Mapping[str, Any] | None,
        operational: Mapping[str, Any],
        accepted: Sequence[str] = (),
    ) -> RunSpec:
        """The run that a training function is configured for, the same under every launcher.

        `config` may hold any values; what is no JSON goes by its repr. An `identity` of None takes
        all of it but what is only operational.
        """
        config = _json_able(config)
        if identity is None:
            identity = {key: value for key, value in config.items() if key not in OPERATIONAL}
        return cls(
            name=name,
            seed=seed,
            config=config,
            identity=_json_able(identity),
            operational={**operational, **{k: config[k] for k in OPERATIONAL if k in config}},
            versions=dict(_versions("ray", "torch")),
            accepted=tuple(accepted),
        )

    def identity_fields(self) -> dict[str, Any]:
        """The identity, the seed among it."""
        return {**self.identity, "seed": self.seed}


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A run that this process may write to. `changed` tells what differs from the last time."""

    lease: Lease
    run_file: RunFile
    is_new: bool
    changed: list[Difference]


class IdentityMismatch(Exception):
    """The name belongs to a run of another model, data, seed or alike; nothing was changed."""

    def __init__(self, url: str, differing: Sequence[str]) -> None:
        super().__init__(url, list(differing))
        self.url = url
        self.differing = list(differing)

    def __str__(self) -> str:
        return (
            f"the run {self.url} was begun with another configuration: "
            f"{'; '.join(self.differing)}. Use another name for a new run, or accept a change "
            'by its field (--accept-change FIELD, or accept_changes=["FIELD"] in ElasticConfig and '
            "run_standalone)"
        )


def claim(fs: Filesystem, spec: RunSpec, what: str) -> Claim:
    """The lease on the run at `fs`, and its file as it now is, secret-like texts left out of it.

    `what` tells people about this owner. Raises:
        LeaseHeld: another driver is at it.
        IdentityMismatch: an identity field differs and was not accepted.
        UnsupportedFormat, ValueError: the run file is of a newer format, or garbled.
    """
    lease = acquire(fs, what)
    try:
        return _open(fs, _redacted(spec), lease)
    except BaseException:
        lease.release()
        raise


def _redacted(spec: RunSpec) -> RunSpec:
    return dataclasses.replace(
        spec,
        config=redacted(dict(spec.config)),
        identity=redacted(dict(spec.identity)),
        operational=redacted(dict(spec.operational)),
    )


def _open(fs: Filesystem, spec: RunSpec, lease: Lease) -> Claim:
    found = load_run_file(fs)
    if found is None:
        _refuse_orphans(fs)
        made = create_run_file(
            fs,
            name=spec.name,
            created_s=time.time(),
            seed=spec.seed,
            config=spec.config,
            identity=spec.identity_fields(),
            operational=spec.operational,
            versions=spec.versions,
        )
        return Claim(lease=lease, run_file=made, is_new=True, changed=[])
    differing = differences(found.identity, spec.identity_fields())
    refused = [str(one) for one in differing if not _is_accepted(one.field, spec.accepted)]
    if refused:
        raise IdentityMismatch(fs.url, refused)
    others = differences(found.operational, spec.operational)
    others += differences(found.versions, spec.versions)
    updated = dataclasses.replace(
        found,
        seed=spec.seed,
        config=dict(spec.config),
        identity=spec.identity_fields(),
        operational=dict(spec.operational),
        versions=dict(spec.versions),
    )
    return Claim(
        lease=lease,
        run_file=update_run_file(fs, updated),
        is_new=False,
        changed=differing + others,
    )


def _refuse_orphans(fs: Filesystem) -> None:
    """A lost run file must not make the checkpoints beside it somebody else's, and start at 0."""
    left = [name for name in ("checkpoints", "ledger", "metrics") if fs.list(name)]
    if left:
        raise ValueError(
            f"{fs.url} holds {', '.join(left)} of a run but no {RUN_FILE}, which says whose they "
            "are: bring it back from a copy, or use another name"
        )


def _is_accepted(name: str, accepted: Sequence[str]) -> bool:
    return any(name == field or name.startswith(f"{field}.") for field in accepted)


def _json_able(tree: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(dict(tree), default=repr))
    return found


def _versions(*packages: str) -> Iterator[tuple[str, str]]:
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield package, importlib.metadata.version(package)
