"""Gradients: how FSDP modules reduce them over ranks, so that a loss divided once stays so.

The loss of a step is divided by the valid tokens of the whole global batch, so what the ranks hold
are summands: the reduction must add them up and divide by nothing. Must not import ray.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

__all__ = ["prepare_fsdp"]


def prepare_fsdp(model: nn.Module) -> int:
    """Makes every FSDP module in `model` sum gradients over ranks; gives how many there were.

    Both settings are needed and neither recurses: without the forced sum, gloo refuses the
    multiplying reduction that a divide factor of 1 asks for.
    """
    fsdp_modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in fsdp_modules:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return len(fsdp_modules)
