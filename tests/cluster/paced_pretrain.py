"""`jobs.pretrain`, slow enough to be disturbed: each step waits a little while a file is there.

The file is named by PACE in the environment. What is computed is not touched.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs import pretrain

if TYPE_CHECKING:
    import elastic

_train = pretrain.train
PACE = os.environ.get("PACE", "")


def train(run: elastic.Run) -> None:
    """The training function of `jobs.pretrain`, with a pause before each optimizer step."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def pause(*_: Any) -> None:
        if Path(PACE).exists():
            time.sleep(0.4)

    run.once("pace", lambda: register_optimizer_step_pre_hook(pause))
    _train(run)


if __name__ == "__main__":
    pretrain.train = train
    sys.exit(pretrain.main())
