"""What an export holds: the parts of a checkpoint under the names that their owners know them by.

Puts together names and what is plain, touches no tensor. Must not import ray.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from elastic.training import tree
from elastic.training.tensor_file import Stored

__all__ = ["Content", "content_of", "plain_enough"]

_OPTIMIZER = {"groups", "state", "shared"}
_WHAT_TORCH_LOADS = (bool, int, float, str, bytes, complex, type(None), Stored)


@dataclass(kw_only=True)
class Content:
    """`model` is a module's state_dict without its extra state, which is `extra`.

    `aliases` are names in `model` that share another one's memory; `optimizers` are state_dicts by
    name, `optimizer_tensors` what is in them as `<optimizer>.<parameter>.<key>`.
    """

    model: dict[str, Stored] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    optimizers: dict[str, Any] = field(default_factory=dict)
    optimizer_tensors: dict[str, Stored] = field(default_factory=dict)

    def flat(self) -> dict[str, Stored]:
        """Each tensor once, under a name of its own.

        Raises `ValueError` when model and optimizer have one of the same name.
        """
        model = {name: stored for name, stored in self.model.items() if name not in self.aliases}
        twice = sorted(model.keys() & self.optimizer_tensors.keys())
        if twice:
            raise ValueError(f"both the model and the optimizer have a tensor {twice[0]!r}")
        return model | self.optimizer_tensors


def plain_enough(value: Any) -> bool:
    """Whether `torch.load(weights_only=True)` takes such extra state."""
    if isinstance(value, list | tuple):
        return all(map(plain_enough, value))
    if type(value) in (dict, OrderedDict, Counter):
        return all(plain_enough(key) and plain_enough(item) for key, item in value.items())
    return isinstance(value, _WHAT_TORCH_LOADS)


def content_of(
    tracked: Mapping[str, Any],
    tensors: Mapping[str, Stored],
    name: str,
    dtype: torch.dtype | None,
    *,
    with_optimizer: bool,
) -> Content:
    """What the module tracked as `name` is exported as, its floating-point tensors as `dtype`.

    `tracked` and `tensors` are those of a checkpoint. Raises `ValueError` if nothing that can be
    exported was tracked under that name.
    """
    part = tracked.get(name)
    if not isinstance(part, dict) or "aliases" not in part:
        modules = [key for key, value in tracked.items() if "aliases" in value]
        raise ValueError(
            f"this run tracks no module as {name!r}; it tracks the modules "
            f"{', '.join(sorted(modules)) or '(none)'}: choose one with --object"
        )
    content = Content(aliases=dict(part["aliases"]))
    own = {
        rest: _as(stored, dtype)
        for whole, stored in tensors.items()
        for prefix, _, rest in [whole.partition(".")]
        if prefix == name
    }
    extra = {slot["name"] for saved in part["extra"].values() for slot in saved["slots"]}
    content.model = {rest: stored for rest, stored in own.items() if rest not in extra}
    content.model |= {alias: own[first] for alias, first in content.aliases.items()}
    content.extra = {key: _joined(saved, own) for key, saved in part["extra"].items()}
    if with_optimizer:
        _add_optimizers(content, tracked, tensors)
    return content


def _add_optimizers(
    content: Content, tracked: Mapping[str, Any], tensors: Mapping[str, Stored]
) -> None:
    for name, part in tracked.items():
        if isinstance(part, dict) and part.keys() >= _OPTIMIZER:
            prefix = f"{name}."
            own = {
                whole.removeprefix(prefix): stored
                for whole, stored in tensors.items()
                if whole.startswith(prefix)
            }
            content.optimizers[name] = _optimizer_state_dict(part, own)
            content.optimizer_tensors |= {prefix + rest: stored for rest, stored in own.items()}
    if not content.optimizers:
        raise ValueError("this run tracks no optimizer: leave --with-optimizer out")


def _optimizer_state_dict(part: Mapping[str, Any], own: Mapping[str, Stored]) -> dict[str, Any]:
    """As `Optimizer.state_dict` gives it: parameters by number, in the order of their groups."""
    names = [name for group in part["groups"] for name in group["parameters"]]
    numbers = {name: number for number, name in enumerate(names)}
    state: dict[Any, Any] = {
        numbers[name]: _joined(saved, own)
        for name, saved in part["state"].items()
        if name in numbers  # or it is in no group, and state_dict has no number for it either
    }
    state |= {key: _joined(saved, own) for key, saved in part["shared"].items()}
    groups = [
        {
            **_joined(group, own),
            "param_names": list(group["parameters"]),
            "params": [numbers[name] for name in group["parameters"]],
        }
        for group in part["groups"]
    ]
    of_its_own = _joined(part["own"], own) if "own" in part else {}
    return {"state": state, "param_groups": groups, **of_its_own}


def _as(stored: Stored, dtype: torch.dtype | None) -> Stored:
    if dtype is None or not stored.dtype.is_floating_point:
        return stored
    return replace(stored, dtype=dtype)


def _joined(saved: Mapping[str, Any], own: Mapping[str, Stored]) -> Any:
    return tree.join(saved, cast("Mapping[str, torch.Tensor]", own))
