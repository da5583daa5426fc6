"""Clipping: the norm of all gradients of a model, on whatever meshes they lie, and scaling by it.

Torch's own stacks the norms of single tensors, which fails where they are on several meshes, as
under tensor parallelism. Here each rank takes the norm of what it holds, one for every way of being
split, and those are put together over the dimensions that the split goes over. Must not import ray.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

__all__ = ["clip_grad_norm_"]

_EPSILON = 1e-6

_Kind = tuple[torch.device, torch.dtype]


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """The norm of all gradients together, as one machine would have it; scales them to `max_norm`.

    Like `torch.nn.utils.clip_grad_norm_`, on any mesh or several. Every rank calls it and gets the
    same plain tensor of no dimension, in float32 or wider. Nothing waits for the device. Gradients
    that are not DTensors count once, and have to be the same on all ranks.

    Raises `RuntimeError` for a norm that is not finite, if asked to, which waits for the device;
    `ValueError` for a `norm_type` that is not above 0.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type is above 0, or inf; found {norm_type}")
    owners = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    gradients = [_whole(one) for one in owners if one.grad is not None]
    if not gradients:
        return torch.zeros(())
    total = _total(gradients, float(norm_type))
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of the gradients is {total.item()}: some gradient is not finite. Scale the "
            "loss down, or leave error_if_nonfinite out to have them scaled by it all the same"
        )
    factor = (max_norm / (total + _EPSILON)).clamp(max=1.0)
    for (device, _), here in _alike([_local(one) for one in gradients]).items():
        torch._foreach_mul_(here, factor.to(device))
    return total


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter's gradient, which from now on is no sum that is still to be made."""
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(gradient, DTensor) and any(one.is_partial() for one in gradient.placements):
        whole = [Replicate() if one.is_partial() else one for one in gradient.placements]
        gradient = parameter.grad = gradient.redistribute(placements=whole)
    return gradient


def _local(gradient: torch.Tensor) -> torch.Tensor:
    # Not to_local, which hands out a view that autograd follows.
    return gradient._local_tensor if isinstance(gradient, DTensor) else gradient


def _alike(tensors: Sequence[torch.Tensor]) -> dict[_Kind, list[torch.Tensor]]:
    found: dict[_Kind, list[torch.Tensor]] = {}
    for one in tensors:
        found.setdefault((one.device, one.dtype), []).append(one)
    return found


def _total(gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    split: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for one in gradients:
        split.setdefault(_split_over(one), []).append(_local(one))
    is_double = any(one.dtype == torch.float64 for one in gradients)
    zero = torch.zeros(
        (),
        dtype=torch.float64 if is_double else torch.float32,
        device=_local(gradients[0]).device,
    )
    return _norm_of_norms(
        [_over(groups, _norm(here, norm_type, zero), norm_type) for groups, here in split.items()],
        norm_type,
    )


def _split_over(gradient: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups whose ranks hold different parts of it: no mesh, for others may be equal to it."""
    if not isinstance(gradient, DTensor):
        return ()
    mesh = gradient.device_mesh
    return tuple(
        mesh.get_group(dim)
        for dim, placement in enumerate(gradient.placements)
        if not placement.is_replicate()
    )


def _norm(tensors: Sequence[torch.Tensor], norm_type: float, zero: torch.Tensor) -> torch.Tensor:
    """Of what this rank holds, which may be nothing."""
    norms = [zero]
    for here in _alike([one for one in tensors if one.numel()]).values():
        norms += [one.to(zero.device) for one in torch._foreach_norm(here, norm_type, zero.dtype)]
    return _norm_of_norms(norms, norm_type)


def _norm_of_norms(norms: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    found: torch.Tensor = torch.linalg.vector_norm(torch.stack(list(norms)), norm_type)
    return found


def _over(
    groups: Sequence[dist.ProcessGroup], norm: torch.Tensor, norm_type: float
) -> torch.Tensor:
    """Put together from all ranks of these groups."""
    for group in groups:
        if math.isinf(norm_type):
            norm = norm.nan_to_num(nan=math.inf)  # which the largest of several would lose
            dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=group)
        else:
            norm = norm**norm_type
            dist.all_reduce(norm, group=group)
            norm = norm ** (1.0 / norm_type)
    return norm
