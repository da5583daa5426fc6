"""Elastic PyTorch training on Ray.

Importing this package is cheap: ray and torch load when a name below is first used, so that
`elastic status` answers at once and a worker decides itself when to pay for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from elastic import versions
from elastic.importing import collector_paused

if TYPE_CHECKING:
    from elastic.cluster.elastic_config import ElasticConfig
    from elastic.cluster.trainer import ElasticTrainer
    from elastic.cluster.training_failed import TrainingFailed
    from elastic.policy.hangs import HangLimits
    from elastic.policy.mesh import Mesh
    from elastic.training.clipping import clip_grad_norm_
    from elastic.training.loggers.logger import Logger
    from elastic.training.loggers.tensorboard import TensorBoardLogger
    from elastic.training.meta_device import materialize
    from elastic.training.parquet import ParquetTokens
    from elastic.training.run import Run
    from elastic.training.sources.lines import JsonLines, TextLines
    from elastic.training.sources.packing import PackedTokens
    from elastic.training.sources.parquet_rows import ParquetRows
    from elastic.training.torchrun import run_standalone

__version__ = "0.1.0"
__all__ = [
    "ElasticConfig",
    "ElasticTrainer",
    "HangLimits",
    "JsonLines",
    "Logger",
    "Mesh",
    "PackedTokens",
    "ParquetRows",
    "ParquetTokens",
    "Run",
    "TensorBoardLogger",
    "TextLines",
    "TrainingFailed",
    "__version__",
    "clip_grad_norm_",
    "materialize",
    "run_standalone",
]

_HOMES = {
    "ElasticConfig": "elastic.cluster.elastic_config",
    "ElasticTrainer": "elastic.cluster.trainer",
    "HangLimits": "elastic.policy.hangs",
    "JsonLines": "elastic.training.sources.lines",
    "Logger": "elastic.training.loggers.logger",
    "Mesh": "elastic.policy.mesh",
    "PackedTokens": "elastic.training.sources.packing",
    "ParquetRows": "elastic.training.sources.parquet_rows",
    "ParquetTokens": "elastic.training.parquet",
    "Run": "elastic.training.run",
    "TensorBoardLogger": "elastic.training.loggers.tensorboard",
    "TextLines": "elastic.training.sources.lines",
    "TrainingFailed": "elastic.cluster.training_failed",
    "clip_grad_norm_": "elastic.training.clipping",
    "materialize": "elastic.training.meta_device",
    "run_standalone": "elastic.training.torchrun",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(
            f"module 'elastic' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    home = _HOMES[name]
    # First, since a name that another version lacks would be all that its user hears of.
    versions.check("torch", *(["ray"] if home.startswith("elastic.cluster.") else []))
    with collector_paused():
        return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
