"""Digests of what a training function holds: short texts that differ when the content does.

Must not import ray.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from elastic.training import rng

# Beyond this a tensor is sampled: a hint is wanted, not a proof.
_MOST_BYTES = 2**25


def of_bytes(data: bytes) -> str:
    """Sixteen hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def of_tensor(tensor: torch.Tensor) -> str:
    """Of this rank's part of a sharded one; shape and dtype count."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    if local.layout is not torch.strided or local.device.type == "meta":
        return of_bytes(repr(local).encode())
    flat = local.reshape(-1)
    flat = flat[:: max(1, flat.numel() * flat.element_size() // _MOST_BYTES)].contiguous().cpu()
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return of_bytes(f"{tuple(local.shape)} {local.dtype}".encode() + data)


def of_tree(tree: Any) -> str:
    """Of all tensors and plain values in nested containers."""
    parts: list[str] = []
    _collect(tree, parts)
    return of_bytes("\n".join(parts).encode())


def _collect(tree: Any, parts: list[str]) -> None:
    if isinstance(tree, torch.Tensor):
        parts.append(of_tensor(tree))
    elif isinstance(tree, dict):
        for key, value in tree.items():
            parts.append(repr(key))
            _collect(value, parts)
    elif isinstance(tree, list | tuple):
        for value in tree:
            _collect(value, parts)
    elif isinstance(tree, int | float | str | bytes | None):
        parts.append(repr(tree))


def of_random_streams() -> dict[str, str]:
    """Of each global stream of this process; draws nothing from them."""
    return {name: of_bytes(repr(state).encode()) for name, state in rng.capture().items()}


def num_rows(tree: Any) -> int:
    """Length of the first dimension of the first tensor in nested containers; 0 without one."""
    if isinstance(tree, torch.Tensor):
        return tree.shape[0] if tree.dim() else 1
    values = tree.values() if isinstance(tree, dict) else tree
    if isinstance(tree, dict | list | tuple):
        return next((found for found in map(num_rows, values) if found), 0)
    return 0
