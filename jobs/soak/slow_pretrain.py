"""`jobs.pretrain` on storage that is slow: each rank's part of a save takes SAVE_TAKES_S seconds.

The time is in the environment. What is computed and what is saved is not touched.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

from jobs import pretrain

if TYPE_CHECKING:
    import elastic

_train = pretrain.train
SAVE_TAKES_S = float(os.environ.get("SAVE_TAKES_S", "0"))


def train(run: elastic.Run) -> None:
    """The training function of `jobs.pretrain`; the first file of each save waits."""
    from elastic.storage.filesystem import Filesystem

    write = Filesystem.open_output
    begun: set[str] = set()

    def slow(self: Filesystem, path: str) -> Any:
        folder = path.rpartition("/")[0]
        if "checkpoints/" in path and folder not in begun:
            begun.add(folder)
            time.sleep(SAVE_TAKES_S)
        return write(self, path)

    def make_slow() -> None:
        Filesystem.open_output = slow  # type: ignore[method-assign]

    run.once("slow", make_slow)
    _train(run)


if __name__ == "__main__":
    pretrain.train = train
    sys.exit(pretrain.main())
