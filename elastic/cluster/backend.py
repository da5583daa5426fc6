"""The Ray Train backend of an elastic run: it makes no process group.

Each generation makes its own, in the training thread, so that a group can end and another begin in
one process. All that is left here is what Ray Train's callbacks ask of a backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elastic.importing import collector_paused

with collector_paused():
    from ray.train.backend import Backend
    from ray.train.torch import TorchConfig


@dataclass
class ElasticTorchConfig(TorchConfig):
    """`TorchConfig` with the backend below."""

    @property
    def backend_cls(self) -> type[Backend]:
        """The backend's class."""
        return _NoProcessGroup


class _NoProcessGroup(Backend):
    # Peers on one node must see each other's devices for NCCL.
    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Nothing: see the module."""

    def on_training_start(self, worker_group: Any, backend_config: Any) -> None:
        """Nothing: see the module."""

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Nothing: the workers are ended, and their groups with them."""
