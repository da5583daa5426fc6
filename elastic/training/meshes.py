"""Forgetting the meshes of a generation that is over.

DTensor caches by mesh, and takes two meshes of one shape for equal although this process's rank in
them differs; what it caches also keeps the old process groups alive, with their threads and
sockets. The names below are private to torch and covered by a contract test.
"""

from __future__ import annotations

import gc

from torch.distributed.tensor import _redistribute
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


def forget_meshes() -> None:
    """Drop what DTensor has cached in this thread, which must be the one that trained."""
    _clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()
    gc.collect()
