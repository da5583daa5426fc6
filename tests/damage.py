"""Damage: what disks, crashes and people do to a run directory, drawn from a seed."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["damage"]

# Values that JSON can hold and no field of ours means.
ODD: tuple[Any, ...] = (None, -1, 1e999, "", "x", [], {}, True, 2**70, [["a"]], {"a": None})


def damage(root: Path, seed: int) -> list[str]:
    """What was done to the run directory `root`: one to four damages, the same for one seed."""
    chance = random.Random(seed)
    return [chance.choice(KINDS)(root, chance) for _ in range(chance.randint(1, 4))]


def missing(root: Path, chance: random.Random) -> str:
    path = _any(root, chance)
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    return f"{path.relative_to(root)} removed"


def truncated(root: Path, chance: random.Random) -> str:
    path = _file(root, chance)
    size = chance.randrange(path.stat().st_size + 1)
    os.truncate(path, size)
    return f"{path.relative_to(root)} cut to {size} bytes"


def flipped(root: Path, chance: random.Random) -> str:
    path = _file(root, chance)
    data = bytearray(path.read_bytes())
    for _ in range(chance.choice([1, 1, 10, 100]) if data else 0):
        data[chance.randrange(len(data))] = chance.randrange(256)
    path.write_bytes(data)
    return f"{path.relative_to(root)} with other bytes"


def garbage(root: Path, chance: random.Random) -> str:
    path = _file(root, chance)
    data = chance.choice([b"", b"\0" * 500, b"\xff\xfe{", b"[" * 100_000, chance.randbytes(700)])
    path.write_bytes(data)
    return f"{path.relative_to(root)} is {len(data)} bytes of garbage"


def swapped(root: Path, chance: random.Random) -> str:
    one, other = _file(root, chance), _file(root, chance)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    return f"{one.relative_to(root)} and {other.relative_to(root)} swapped"


def renamed(root: Path, chance: random.Random) -> str:
    path = _any(root, chance)
    names = ["step-8", "step-99", "step-08", "step-4-0", "step-8.tmp-0-0", "_COMPLETE", "x", "pins"]
    target = path.with_name(chance.choice(names))
    if target.exists() or target == path:
        return "nothing renamed"
    path.rename(target)
    return f"{path.relative_to(root)} renamed to {target.name}"


def copied(root: Path, chance: random.Random) -> str:
    path = _any(root, chance)
    target = path.with_name(
        chance.choice(["step-16", "step-4-7", "000009-x.arrows", "copy", "é [*]"])
    )
    if target.exists() or path in target.parents:
        return "nothing copied"
    shutil.copytree(path, target, symlinks=True) if path.is_dir() else shutil.copy(path, target)
    return f"{path.relative_to(root)} copied to {target.name}"


def other_kind(root: Path, chance: random.Random) -> str:
    """A directory in the place of a file, or the other way round."""
    path = _any(root, chance)
    if path.is_dir():
        shutil.rmtree(path)
        path.write_bytes(b"a file")
    else:
        path.unlink()
        path.mkdir()
    return f"{path.relative_to(root)} is of the other kind"


def odd_value(root: Path, chance: random.Random) -> str:
    """Valid JSON with one value, at any depth, that makes no sense."""
    files = [path for path in _files(root) if path.suffix == ".json" or path.name == "_COMPLETE"]
    if not files:
        return "no JSON left"
    path = chance.choice(files)
    try:
        tree = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return "no JSON any more"
    where, key = tree, None
    while isinstance(where, dict | list) and where:
        key = chance.choice(list(where) if isinstance(where, dict) else range(len(where)))
        if not isinstance(where[key], dict | list) or not where[key] or chance.random() < 0.4:
            where[key] = chance.choice(ODD)
            break
        where = where[key]
    path.write_text(json.dumps(tree))
    return f"{path.relative_to(root)} with an odd value for {key!r}"


def dangling(root: Path, chance: random.Random) -> str:
    path = _any(root, chance)
    target = path.with_name(chance.choice(["step-20", "link", "_COMPLETE", "manifest.json"]))
    if target.exists() or target.is_symlink():
        return "no link made"
    target.symlink_to(chance.choice(["nowhere", target.name, "."]))
    return f"{target.relative_to(root)} is a link to {os.readlink(target)}"


Kind = Callable[[Path, random.Random], str]
KINDS: list[Kind] = [
    missing,
    truncated,
    flipped,
    flipped,
    garbage,
    swapped,
    renamed,
    copied,
    other_kind,
    odd_value,
    odd_value,
    dangling,
]


def _any(root: Path, chance: random.Random) -> Path:
    return chance.choice(
        sorted(path for path in root.rglob("*") if not path.is_symlink()) or [root]
    )


def _files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())


def _file(root: Path, chance: random.Random) -> Path:
    files = _files(root)
    if not files:
        (root / "left").write_bytes(b"over")
        files = [root / "left"]
    return chance.choice(files)
