"""The loaders of one rank in one generation: where each goes on, and what is kept of where it is.

A checkpoint holds the position of each loader by its name, as of the last finished step: what was
handed out for a step that is dropped, or read ahead, is not trained. Must not import ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic.policy.mesh import TENSOR, MeshShape
from elastic.training.agreement import Agreement
from elastic.training.coordinator import Coordinator
from elastic.training.data import GlobalLoader
from elastic.training.membership import Membership
from elastic.training.passes import is_foretold


class SourcesDiffer(ValueError):
    """The ranks read other samples from what should be one source."""


class Loaders:
    """Named loaders, each at its own position."""

    def __init__(
        self,
        coordinator: Coordinator,
        member: Membership,
        shape: MeshShape,
        accepted: Sequence[str] = (),
    ) -> None:
        """For `accepted` see `GlobalLoader`."""
        self._coordinator = coordinator
        self._is_told = member.world_rank == 0  # this rank tells the driver what is read
        self._shape = shape
        self._accepted = accepted
        self._open: dict[str, GlobalLoader] = {}
        self._states: dict[str, dict[str, Any]] = {}
        self._has_names = True
        self._counted: set[str] = set()
        self._told: dict[str, Any] = {}

    def restored(self, plain: Mapping[str, Any]) -> None:
        """The checkpoint that is resumed holds this."""
        self._has_names = "loaders" in plain  # those of older versions hold one count for all
        self._states = dict(plain.get("loaders", {}))

    def start(self, name: str, samples: int) -> dict[str, Any]:
        """What a `GlobalLoader` of this name is made with, in a run that has done `samples`.

        Raises ValueError for a name that is taken.
        """
        if name in self._open:
            raise ValueError(
                f"run.loader was called for a second loader with the name {name!r}: make a loader "
                "once, and give each one a name of its own, as in run.loader(..., name='second')"
            )
        start: dict[str, Any] = {"name": name, "accepted": self._accepted}
        if not self._has_names:
            return {**start, "samples_done": samples, "state": {}}
        state = self._states.get(name, {"samples": 0})
        return {**start, "samples_done": state["samples"], "state": state}

    def add(self, name: str, loader: GlobalLoader) -> GlobalLoader:
        """A loader that was made as `start` says."""
        self._open[name] = loader
        self._states[name] = loader.state
        return loader

    def begin(self, loader: GlobalLoader, step: int) -> None:
        """The steps after `step` are those of this loader."""
        self._counted.add(self._name(loader))
        self._tell(loader, step, loader.position)

    def finished(self, loader: GlobalLoader, step: int, agreement: Agreement) -> None:
        """The step is trained whose samples the loader gave last.

        Raises SourcesDiffer if the ranks are not at the same place of their sources.
        """
        if not agreement.is_same(loader.place):
            raise SourcesDiffer(
                "the ranks read different samples: the passes over the source do not end at the "
                f"same sample on all of them (here one began at {loader.place}). It must give "
                "every rank all samples, in one order: do not split it by rank"
            )
        self._states[self._name(loader)] = loader.state
        by_count = self._told["read"] == "by count"
        if by_count and not is_foretold(self._told, loader.facts(loader.position)):
            self._tell(loader, step - 1, loader.position - loader.global_batch)

    def own(self, step: int) -> None:
        """The steps after `step` are of a loop that the user owns.

        Its samples count as those of the loader that was made first: what is read ahead of it
        does not.
        """
        name = next(iter(self._open), None)
        if name is not None and name not in self._counted:
            self._counted.add(name)
            self._tell(self._open[name], step, self._states[name]["samples"])

    def counted(self, num_samples: int) -> None:
        """So many samples were trained in the step of a loop that the user owns."""
        name = next(iter(self._open), None)
        if name is not None:
            done = self._states[name]["samples"] + num_samples
            self._states[name] = {**self._open[name].state, "samples": done}

    def states(self) -> dict[str, dict[str, Any]]:
        """What a checkpoint holds; of a loader that is not open now, what the one before held."""
        for name, loader in self._open.items():
            if name not in self._counted:
                self._states[name] = loader.state
        return dict(self._states)

    def close(self) -> None:
        """End what they read ahead with: a kept traceback would hold it through a re-form."""
        for loader in self._open.values():
            loader.close()

    def _name(self, loader: GlobalLoader) -> str:
        for name, one in self._open.items():
            if one is loader:
                return name
        raise ValueError("run.steps needs a loader that run.loader has made, in this generation")

    def _tell(self, loader: GlobalLoader, step: int, position: int) -> None:
        self._told = loader.facts(position)
        if self._is_told:
            name = self._name(loader)
            facts = {**self._told, "loader": name, "tensor": self._shape[TENSOR]}
            facts["other_loaders"] = [other for other in self._open if other != name]
            if loader.change:
                facts["accepted"] = loader.change
            told = {"step": step, "reason": _in_words(facts), "facts": facts}
            self._coordinator.notify("data_read", told)


def _in_words(facts: Mapping[str, Any]) -> str:
    num_ranks = facts["world_size"] * facts["tensor"]
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    if facts["tensor"] > 1:
        ranks += f" in tensor-parallel groups of {facts['tensor']}"
    accepted = f"; accepted: {facts['accepted']}" if "accepted" in facts else ""
    return (
        f"{facts['dataset']} from sample {facts['samples_done']} on, {facts['global_batch']} a step"
        f", over {ranks}{accepted}"
    )
