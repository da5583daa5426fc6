"""What nearly every rank needs and no rank changes: imported once, in the process they fork from.

Half of a small test was spent importing it, and half of the rest in walks of the garbage collector
over what it had made.
"""

from __future__ import annotations

import gc

from elastic.importing import collector_paused

with collector_paused():
    import pandas  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import pytest  # noqa: F401
    import torch.distributed.checkpoint
    import torch.distributed.fsdp  # noqa: F401
    import torchdata.stateful_dataloader  # noqa: F401

    import tests.dist.small_run
    import tests.dist.undisturbed  # noqa: F401
gc.freeze()
