"""The run file: what a run is, made once at its start and read at each resume.

Its `run_id` owns the checkpoints. Must not import ray or torch; decides nothing about differences.
"""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from elastic.storage.filesystem import Filesystem
from elastic.storage.format import check_format

FORMAT_VERSION = 1
RUN_FILE = "run.json"
ABSENT = "(absent)"
_TYPES: dict[str, Any] = {
    "name": str,
    "run_id": str,
    "created_s": int | float,
    "seed": int,
    "config": dict,
    "identity": dict,
    "operational": dict,
    "versions": dict,
}


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """One run; all mappings hold JSON values, `created_s` is wall time.

    `identity` fields must match on resume, `operational` ones may change; `versions` are those of
    the software that created or last resumed it.
    """

    name: str
    run_id: str
    created_s: float
    seed: int
    config: dict[str, Any]
    identity: dict[str, Any]
    operational: dict[str, Any]
    versions: dict[str, str]
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One field, nested ones as `optimizer.lr`, with both values; `ABSENT` on the side without."""

    field: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.field}: was {self.old!r}, now {self.new!r}"


def load_run_file(fs: Filesystem) -> RunFile | None:
    """The run file at the root `fs`, None if no run was ever started there.

    Raises `UnsupportedFormat` if a newer program wrote it, `ValueError` if it is garbled.
    """
    try:
        text = fs.read_bytes(RUN_FILE)
    except FileNotFoundError:
        return None
    where = f"{RUN_FILE} in {fs.url}"
    try:
        tree = json.loads(text)
        check_format(where, tree["format_version"], FORMAT_VERSION)
        return _from_tree(tree)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{where} cannot be read ({type(error).__name__}: {error}): bring it back from a copy; "
            "without its run_id the checkpoints beside it have no owner"
        ) from error


def free_name(storage: str, name: str) -> str:
    """`name`, or the first of NAME-2, NAME-3 and so on that nothing at this storage is called."""
    taken = {entry.name for entry in Filesystem.at(storage).list()}
    number = 2
    while (found := name if number == 2 and name not in taken else f"{name}-{number}") in taken:
        number += 1
    return found


def create_run_file(
    fs: Filesystem,
    *,
    name: str,
    created_s: float,
    seed: int,
    config: Mapping[str, Any],
    identity: Mapping[str, Any],
    operational: Mapping[str, Any],
    versions: Mapping[str, str],
) -> RunFile:
    """The new run's file, written, with a `run_id` no other run has.

    Raises `FileExistsError` if there is a run at this root, `TypeError` for values not JSON.
    """
    if fs.exists(RUN_FILE):
        raise FileExistsError(f"{fs.url} holds a run already: resume it, or choose another name")
    run_file = RunFile(
        name=name,
        run_id=uuid.uuid4().hex,
        created_s=created_s,
        seed=seed,
        config=dict(config),
        identity=dict(identity),
        operational=dict(operational),
        versions=dict(versions),
    )
    return _write(fs, run_file)


def update_run_file(fs: Filesystem, run_file: RunFile) -> RunFile:
    """The file as it now is in place of the one at `fs`, all at once.

    Raises `ValueError` if the run there is another one, or if there is none.
    """
    old = load_run_file(fs)
    if old is None or old.run_id != run_file.run_id:
        found = "no run" if old is None else f"run {old.run_id!r}"
        raise ValueError(f"{fs.url} holds {found}, not run {run_file.run_id!r}: not updated")
    return _write(fs, run_file)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """The fields whose values differ, by name, as they differ once written to JSON and read back.

    Tuples equal lists and 1 equals 1.0; True does not equal 1.
    """
    return list(_differences("", _as_json(old), _as_json(new)))


def _differences(prefix: str, old: Any, new: Any) -> Iterator[Difference]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() | new.keys()):
            field = f"{prefix}.{name}" if prefix else name
            yield from _differences(field, old.get(name, ABSENT), new.get(name, ABSENT))
    elif not _same(old, new):
        yield Difference(field=prefix, old=old, new=new)


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(_same, old, new))
    if isinstance(old, dict) and isinstance(new, dict):
        return old.keys() == new.keys() and all(_same(old[name], new[name]) for name in old)
    if isinstance(old, bool) or isinstance(new, bool):
        return old is new
    # The texts make NaN equal itself.
    return bool(old == new) or json.dumps(old) == json.dumps(new)


def _write(fs: Filesystem, run_file: RunFile) -> RunFile:
    tree = _as_json(dataclasses.asdict(run_file))
    fs.write_bytes(RUN_FILE, (json.dumps(tree, indent=1, sort_keys=True) + "\n").encode())
    return RunFile(**tree)


def _from_tree(tree: Mapping[str, Any]) -> RunFile:
    names = {field.name for field in dataclasses.fields(RunFile)}
    values = {name: value for name, value in tree.items() if name in names}
    for name, expected in _TYPES.items():
        if not isinstance(values.get(name), expected):
            raise TypeError(f"{name} is {values.get(name)!r}")
    return RunFile(**values)


def _as_json(tree: Any) -> Any:
    return json.loads(json.dumps(tree))
