"""Holdings: everything that can be reached from a running training function and is not tracked.

Reads variables of frames, of the function's module and of its closures, and follows them; runs no
code of the objects it meets but `state_dict` of PyTorch's own. Must not import ray.
"""

from __future__ import annotations

import contextlib
import enum
import gc
import itertools
import random
import types
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, Sampler

from elastic.training.rehearsal import digest
from elastic.training.rehearsal.holding import (
    COUNTER,
    DATA,
    DIGEST,
    EMA,
    MODEL,
    OPTIMIZER,
    RNG,
    SCALER,
    SCHEDULER,
    STATE,
    Holding,
    kind_by_name,
)

_PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device)
_NEVER = (
    *(types.ModuleType, type, types.BuiltinFunctionType, types.FrameType, types.TracebackType),
    *(types.CodeType, types.MappingProxyType),
)
# What objects of these packages hold is not the training's: ours, locks, logs, progress bars.
_NOT_THEIRS = (
    *("elastic", "ray", "click", "logging", "threading", "_thread", "_io", "concurrent"),
    *("asyncio", "multiprocessing", "tqdm", "rich", "wandb", "tensorboard", "mlflow"),
)
_DEEPEST, _MOST_LEAVES, _MOST_ITEMS, _LONGEST_TEXT = 9, 20_000, 256, 40

_TYPES: tuple[tuple[type, str], ...] = (
    (LRScheduler, SCHEDULER),
    (Optimizer, OPTIMIZER),
    (AveragedModel, EMA),
    (torch.amp.GradScaler, SCALER),
    (torch.Generator, RNG),
    (random.Random, RNG),
    (np.random.Generator, RNG),
    (np.random.RandomState, RNG),
    (Sampler, DATA),
    (DataLoader, DATA),
    (Dataset, DATA),
)
# Those that matter wherever they are kept. torch.Generator is not known to the collector.
_SOUGHT = (LRScheduler, Optimizer, AveragedModel, torch.amp.GradScaler)


def frames_above(frame: types.FrameType | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Name and variables of the functions that wait for this call, innermost first, up to ours."""
    while frame is not None and frame.f_globals.get("__name__") != "elastic.training.standalone":
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _NOT_THEIRS:
            yield f"{frame.f_code.co_name}()", dict(frame.f_locals)
        frame = frame.f_back


def module_variables(function: Any) -> tuple[str, dict[str, Any]]:
    """Name and variables of the module that defines this function."""
    function = getattr(function, "func", function)
    variables = getattr(function, "__globals__", {})
    own = {name: value for name, value in variables.items() if not name.startswith("__")}
    return f"module {variables.get('__name__', '?')}", own


def identities(tracked: Iterable[Any]) -> set[int]:
    """Ids of tracked objects and of what belongs to them."""
    found: set[int] = set()
    for value in tracked:
        found.add(id(value))
        if isinstance(value, nn.Module):
            found |= {id(module) for module in value.modules()}
            found |= {id(tensor) for tensor in itertools.chain(value.parameters(), value.buffers())}
    return found


@dataclass(frozen=True, kw_only=True)
class _Place:
    where: str
    root: str
    owner: str
    type_name: str
    kind: str | None
    path: str
    depth: int = 0


class Holdings:
    """Collects the leaves below variables, each object once, by the first path that leads there."""

    def __init__(self, skip: Set[int]) -> None:
        self.leaves: list[Holding] = []
        self._seen = set(skip)
        # Ids are only unique among objects that live.
        self._alive: list[Any] = []

    def add(self, where: str, variables: Mapping[str, Any]) -> None:
        """All that these variables lead to."""
        for name, value in variables.items():
            self._visit(
                value,
                _Place(where=where, root=name, owner=name, type_name="", kind=None, path=name),
                name,
            )

    def add_sought(self) -> None:
        """Schedulers, optimizers, averaged models and scalers, wherever else in this process."""
        for value in gc.get_objects():
            # Not isinstance, which asks some proxies for their __class__.
            if issubclass(type(value), _SOUGHT) and id(value) not in self._seen:
                self.add("somewhere", {f"a {type(value).__name__}": value})

    def _visit(self, value: Any, at: _Place, name: str) -> None:
        if isinstance(value, _PLAIN):
            self._leaf(value, at)
            return
        if isinstance(value, _NEVER) or at.depth > _DEEPEST or id(value) in self._seen:
            return
        if len(self.leaves) >= _MOST_LEAVES or _is_not_theirs(value):
            return
        self._seen.add(id(value))
        self._alive.append(value)
        at = _named(value, at, name)
        if isinstance(value, torch.Tensor | np.ndarray | np.generic):
            self._digested(value, at)
        elif at.kind == RNG and isinstance(value, torch.Generator):
            self._digested(value.get_state(), at)
        elif isinstance(value, random.Random):
            self._record(DIGEST + digest.of_bytes(repr(value.getstate()).encode()), at)
        elif isinstance(value, np.random.RandomState | np.random.Generator):
            state = value.get_state() if hasattr(value, "get_state") else value.bit_generator.state
            self._record(DIGEST + digest.of_bytes(repr(state).encode()), at)
        else:
            self._follow(value, at)

    def _follow(self, value: Any, at: _Place) -> None:
        if isinstance(value, dict):
            self._items([(_key(key), key, inner) for key, inner in value.items()], at)
        elif isinstance(value, list | tuple | deque):
            self._sequence(value, at)
        elif isinstance(value, set | frozenset):
            self._record(f"{len(value)} items", at)
        else:
            members = list(_members(value))
            self._items([(f".{name}", name, inner) for name, inner in members], at)

    def _items(self, items: Sequence[tuple[str, Any, Any]], at: _Place) -> None:
        if len(items) > _MOST_ITEMS:
            self._record(f"{len(items)} items", replace(at, path=f"len({at.path})"))
        for suffix, name, inner in items[:_MOST_ITEMS]:
            below = replace(at, path=f"{at.path}{suffix}", depth=at.depth + 1)
            self._visit(inner, below, str(name))

    def _sequence(self, value: Sequence[Any], at: _Place) -> None:
        if len(value) > 8 and all(isinstance(item, _PLAIN) for item in value):
            text = digest.of_bytes(repr(value).encode())
            self._record(f"{len(value)} items, {DIGEST}{text}", at)
            return
        self._items([(f"[{index}]", "", inner) for index, inner in enumerate(value)], at)

    def _digested(self, value: Any, at: _Place) -> None:
        tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
        if tensor.numel() == 1 and tensor.layout is torch.strided and type(tensor) is torch.Tensor:
            self._record(repr(tensor.item()), at)
        else:
            self._record(f"{DIGEST}{digest.of_tensor(tensor)}", at)

    def _leaf(self, value: Any, at: _Place) -> None:
        text = repr(value)
        if len(text) > _LONGEST_TEXT:
            text = f"{DIGEST}{digest.of_bytes(text.encode())}"
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        kind = at.kind or kind_by_name(at.path) or (COUNTER if is_number else STATE)
        self._record(text, replace(at, kind=kind, type_name=at.type_name or type(value).__name__))

    def _record(self, text: str, at: _Place) -> None:
        self.leaves.append(
            Holding(
                where=at.where,
                root=at.root,
                owner=at.owner,
                type_name=at.type_name,
                kind=at.kind or kind_by_name(at.path) or STATE,
                path=at.path,
                value=text,
            )
        )


def _named(value: Any, at: _Place, name: str) -> _Place:
    """The place with its kind and owner, where this value is the first that tells them."""
    if at.kind is not None:
        return at
    kind = next((kind for base, kind in _TYPES if isinstance(value, base)), None)
    if kind is None and isinstance(value, nn.Module):
        kind = EMA if kind_by_name(name, type(value).__name__) == EMA else MODEL
    if kind is None and not isinstance(value, dict | list | tuple | set | str | torch.Tensor):
        kind = kind_by_name(name, type(value).__name__)
        if kind is None and hasattr(type(value), "__next__"):
            kind = DATA
    if kind is None:
        return replace(at, type_name=at.type_name or type(value).__name__)
    return replace(at, kind=kind, owner=at.path, type_name=type(value).__name__)


def _is_not_theirs(value: Any) -> bool:
    package = type(value).__module__.partition(".")[0]
    return package in _NOT_THEIRS or type(value).__module__.startswith("torch.distributed.")


def _key(key: Any) -> str:
    return f"[{key!r}]" if isinstance(key, str | int | float | tuple) else f"[{type(key).__name__}]"


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of what an object holds. Runs none of its own code."""
    if isinstance(value, Optimizer | LRScheduler | torch.amp.GradScaler):
        yield from value.state_dict().items()
    elif isinstance(value, nn.Module):
        yield from itertools.chain(value.named_parameters(), value.named_buffers())
        yield "training", value.training
    elif isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from ((name, cell.cell_contents) for name, cell in cells if _is_filled(cell))
    elif isinstance(value, types.MethodType):
        yield "__self__", value.__self__
    elif isinstance(value, types.GeneratorType):
        if value.gi_frame is not None:
            yield from dict(value.gi_frame.f_locals).items()
    elif type(value).__module__ in ("builtins", "itertools") and hasattr(value, "__next__"):
        with warnings.catch_warnings(), contextlib.suppress(TypeError):
            warnings.simplefilter("ignore")
            yield "state", tuple(value.__reduce__()[1:])
    else:
        slots = (getattr(base, "__slots__", ()) for base in type(value).__mro__)
        names = (name for group in slots for name in ([group] if isinstance(group, str) else group))
        filled = ((name, getattr(value, name)) for name in names if hasattr(value, name))
        yield from itertools.chain(dict(getattr(value, "__dict__", {})).items(), filled)


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
