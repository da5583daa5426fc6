"""Parameter groups: which saved group of an optimizer is which live one, told by their parameters.

Position tells nothing: a group may have moved, and its list may be in another order. Who is in
which group is state too, since parameters are unfrozen and frozen while a run trains. Must not
import ray.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.training.part import NOTHING, Mismatch

__all__ = ["Match", "match_groups", "match_saved"]

Names = Sequence[Sequence[Sequence[str]]]


@dataclass(kw_only=True)
class Match:
    """Pairs (index of the live group, index of the saved group), and what fits nowhere.

    With `is_regrouped` the live groups are to become the saved ones, in their order; a group that
    was added in training has no live one, and its pair begins with None.
    """

    pairs: list[tuple[int | None, int]] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    is_regrouped: bool = False

    def refuse(self, name: str, expected: str, found: str) -> None:
        self.mismatches.append(Mismatch(name=name, expected=expected, found=found))


def match_saved(
    plain: Mapping[str, Any], live: Names, built: Names, known: Container[str]
) -> Match:
    """Which saved groups the live ones are, or are to become.

    They are to become the saved ones where they were built as those were, and training has changed
    either since; the indices are then those of the groups as built. `known` are the names of all
    parameters that could be in a group.
    """
    match = match_groups([group["parameters"] for group in plain["groups"]], live)
    # A checkpoint of an earlier release does not tell how they were built.
    if not match.mismatches or "built" not in plain:
        return match
    as_built = match_groups(plain["built"], built)
    if as_built.mismatches:
        return match
    here = {there: index for index, there in as_built.pairs}
    match = Match(is_regrouped=True)
    for there, group in enumerate(plain["groups"]):
        match.pairs.append((here.get(group["built"]), there))
        for name in group["parameters"]:
            if name not in known:
                match.refuse(name, NOTHING, f"a parameter of group {there}")
    return match


def match_groups(saved: Sequence[Sequence[str]], live: Names) -> Match:
    """Pairs of groups with the same parameters; empty ones pair up in their order.

    `saved` has one name per parameter, `live` all names that each parameter goes by.
    """
    match = Match()
    home = {name: index for index, group in enumerate(live) for names in group for name in names}
    for there, group in enumerate(saved):
        _pair(match, there, group, home)
    known = {name for group in saved for name in group}
    for index, live_group in enumerate(live):
        for names in live_group:
            if known.isdisjoint(names):
                match.refuse(names[0], f"a parameter of group {index}", NOTHING)
    _pair_empty(match, saved, live)
    # Two saved groups in one live one would leave it the settings of either.
    if not match.mismatches and not len(saved) == len(live) == len(dict(match.pairs)):
        match.refuse("param_groups", _sizes(live), _sizes(saved))
    return match


def _pair(match: Match, there: int, group: Sequence[str], home: dict[str, int]) -> None:
    for name in group:
        if name not in home:
            match.refuse(name, NOTHING, f"a parameter of group {there}")
    homes = sorted({home[name] for name in group if name in home})
    if len(homes) > 1:
        stray = next(name for name in group if home.get(name) == homes[1])
        match.refuse(stray, f"it in group {homes[1]}", f"it in one group with {group[0]!r}")
    elif homes:
        match.pairs.append((homes[0], there))


def _pair_empty(match: Match, saved: Sequence[Sequence[str]], live: Names) -> None:
    here = [index for index, group in enumerate(live) if not group]
    there = [index for index, group in enumerate(saved) if not group]
    match.pairs += zip(here, there, strict=False)
    if len(here) != len(there):
        match.refuse("param_groups", f"{len(here)} empty groups", f"{len(there)}")


def _sizes(groups: Sequence[Sequence[object]]) -> str:
    return f"groups of {', '.join(str(len(group)) for group in groups)} parameters"
