"""A row of tokens: documents one after another, cut into windows of a fixed length.

Token number and item number belong to the row as a whole, so any item can be read without those
before it, and a position among items is a position in the data. Subclasses decode blocks of the
row. Must not import ray; torch only where an item is made.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from elastic.training.sources.blockwise import CACHE_BYTES, Blockwise, Indices

if TYPE_CHECKING:
    import torch

Tokens = npt.NDArray[Any]  # of the integer type the source has

_MOST_SPARES = 4

BLOCK_TOKENS = 1 << 20
"""Smaller pieces that lie side by side are read as one block of about so many tokens."""


class TokenRow(Blockwise[Tokens]):
    """Map-style dataset: item i is {"input_ids", "labels"}, int64 tensors of `length` tokens.

    Item i starts at token i * length, its labels are the tokens one further on. The tokens left
    over at the end, too few for an item, are not used.
    """

    def __init__(self, length: int, cache_bytes: int = CACHE_BYTES) -> None:
        if length < 1:
            raise ValueError(f"length must be 1 token or more, found {length}")
        self.length = length
        self._token_dtype: Any = np.dtype(np.int64)
        super().__init__(cache_bytes)

    def _lies_in(self, token_starts: Indices, holder: str, where: str = "") -> None:
        """Told by the subclass: the first token of each block, then the number of tokens.

        Raises ValueError for too few tokens for one item.
        """
        self._token_starts = token_starts
        num_items = (self.num_tokens - 1) // self.length if self.num_tokens else 0
        if num_items < 1:
            raise ValueError(
                f"{holder} holds {self.num_tokens} tokens{where}: one item of length "
                f"{self.length} needs {self.length + 1}. Give more data or a smaller length"
            )
        # An item belongs to the block that its first token lies in.
        self.block_starts = np.minimum(-(-token_starts // self.length), num_items)

    @property
    def num_tokens(self) -> int:
        return int(self._token_starts[-1])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: of[0] for name, of in self.collated([index]).items()}

    def collated(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """These items as one batch, as torch's default collate function makes it of them."""
        from torch import from_numpy

        return {name: from_numpy(rows) for name, rows in self.rows(indices).items()}

    def rows(self, indices: Sequence[int]) -> dict[str, npt.NDArray[np.int64]]:
        """These items as arrays (len(indices), length)."""
        if self.num_threads > 1:
            self.prefetch(indices)
        starts = self._checked(indices) * self.length
        blocks = np.searchsorted(self._token_starts, starts, side="right") - 1
        # By block, so that each is at hand while all of its items are read.
        rows = np.argsort(blocks, kind="stable")
        blocks, starts = blocks[rows], (starts - self._token_starts[blocks])[rows]
        found = np.empty((len(indices), self.length + 1), self._token_dtype)
        places = zip(rows.tolist(), blocks.tolist(), starts.tolist(), strict=True)
        for row, block, start in places:
            found[row] = self._block(block)[start : start + self.length + 1]
        # Each token twice, or who writes into the labels would change the input too; but in one
        # piece of memory, which malloc keeps at hand where it would give two back to the system.
        inputs, labels = np.empty((2, len(indices), self.length), dtype=np.int64)
        inputs[:], labels[:] = found[:, :-1], found[:, 1:]
        return {"input_ids": inputs, "labels": labels}

    def tokens(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens start .. stop - 1 of the whole row, an int64 array of its own."""
        found = np.empty(stop - start, dtype=np.int64)
        block = int(np.searchsorted(self._token_starts, start, side="right")) - 1
        done = start
        while done < stop:
            begin, end = self._token_starts[block : block + 2].tolist()
            until = min(stop, end)
            found[done - start : until - start] = self._block(block)[done - begin : until - begin]
            done, block = until, block + 1
        return found

    def _read(self, block: int) -> Tokens:
        """The block and as many tokens behind it as its last item may need.

        In a shuffled order the next block is far from its turn, so its beginning alone is decoded.
        """
        begin, end = self._token_starts[block : block + 2].tolist()
        stop = min(end + self.length, self.num_tokens)
        tokens = self._spare(stop - begin)
        self._decode(block, tokens[: end - begin])
        while end < stop:
            block += 1
            until = min(stop, int(self._token_starts[block + 1]))
            if end < until:
                tokens[end - begin : until - begin] = self._beginning(block, until - end)
            end = until
        return tokens

    @abstractmethod
    def _decode(self, block: int, tokens: Tokens) -> None:
        """Fill `tokens` with those of the block. Raises ValueError if there are not as many."""

    @abstractmethod
    def _beginning(self, block: int, num_tokens: int) -> Tokens:
        """The first tokens of a block, without decoding much more."""

    def _spare(self, num_tokens: int) -> Tokens:
        """Memory for a block, of one that was dropped if there is any."""
        try:
            spare = self._spares.pop()  # at once, since several threads may ask
        except IndexError:
            spare = np.empty(0, self._token_dtype)
        if len(spare) < num_tokens:
            spare = np.empty(num_tokens, self._token_dtype)
        return spare[:num_tokens]

    def _dropped(self, block: Tokens) -> None:
        self._spares.append(block)

    def _forget(self) -> None:
        super()._forget()
        self._spares: deque[Tokens] = deque(maxlen=_MOST_SPARES)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        del state["_spares"]
        return state

    def _bytes_of(self, block: Tokens) -> int:
        return int(block.nbytes)
