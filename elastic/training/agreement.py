"""What all ranks want of one step, summed over them while the forward pass runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


class Agreement:
    """One small sum over the group, begun at the start of a step and read when first needed.

    Every rank gets the same numbers, so that all decide alike, whoever heard of a wish first.
    """

    def __init__(
        self,
        *,
        num_valid_tokens: int,
        num_samples: int,
        save: bool,
        leave: bool,
        last_step_s: float,
        group: dist.ProcessGroup,
        place: int = 0,
        saves_ended: bool = False,
        snapshot: tuple[bool, bool] = (True, False),
    ) -> None:
        """`last_step_s` is how long the step before took on this rank; 0 for the first.

        `place` is to be the same on all ranks: see `is_same`. `saves_ended`: this rank has no save
        in flight. `snapshot`: whether this rank is through with its part of the last one, and
        whether that part is kept.
        """
        took_ms = int(last_step_s * 1000)
        wants = [num_valid_tokens, num_samples, int(save), int(leave), took_ms, place]
        wants += [int(snapshot[0]), int(snapshot[1]), int(saves_ended)]
        self._world_size = dist.get_world_size(group)
        self._sums = torch.tensor(wants, dtype=torch.int64)
        self._work = dist.all_reduce(self._sums, group=group, async_op=True)
        self._values: Sequence[int] | None = None

    def _value(self, index: int) -> int:
        if self._values is None:
            self._work.wait()
            self._values = self._sums.tolist()
        return self._values[index]

    def num_valid_tokens(self) -> int:
        """Valid tokens of the global batch."""
        return self._value(0)

    def num_samples(self) -> int:
        """Samples of the global batch, as the ranks gave them."""
        return self._value(1)

    def save(self) -> bool:
        """Whether any rank wants a save after this step."""
        return self._value(2) > 0

    def leave(self) -> bool:
        """Whether any rank was asked to save, commit and leave after this step."""
        return self._value(3) > 0

    def last_step_s(self) -> float:
        """How long the step before took, on average over the ranks."""
        return self._value(4) / 1000 / self._world_size

    def is_same(self, place: int) -> bool:
        """Whether the place of this rank, as given, is the average; else some are elsewhere."""
        return self._value(5) == place * self._world_size

    def snapshot_is_ended(self) -> bool:
        """Whether every rank is through with its part of the last snapshot, for good or ill."""
        return self._value(6) == self._world_size

    def snapshot_is_kept(self) -> bool:
        """Whether every rank's part of the last snapshot is kept: it is whole, if a node goes."""
        return self._value(7) == self._world_size

    def saves_ended(self) -> bool:
        """Whether no rank had a save in flight when the step began."""
        return self._value(8) == self._world_size
