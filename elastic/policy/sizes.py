"""Sizes: how many bytes a checkpoint takes, told from the number of parameters alone. Pure.

What does not grow with the parameters (step counters, scheduler, random streams, position in the
data: well under 1 MB a rank) is left out. GB means 1e9 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

DTYPE_BYTES: Mapping[str, int] = {
    "fp64": 8,
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8": 1,
}

OPTIMIZER_STATE: Mapping[str, tuple[str, ...]] = {
    "adadelta": ("square_avg", "acc_delta"),
    "adagrad": ("sum",),
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adamw-amsgrad": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "lion": ("exp_avg",),
    "rmsprop": ("square_avg",),
    "sgd": (),
    "sgd-momentum": ("momentum_buffer",),
}
"""The tensors of a parameter's own shape that each optimizer keeps for it, by torch.optim's names
(lion: by those of its reference code)."""


@dataclass(frozen=True, kw_only=True)
class Component:
    """One kind of tensor in a checkpoint, all parameters together."""

    kind: str
    """`parameters`, `optimizer` or `ema`."""
    name: str
    dtype: str
    num_bytes: int

    def per_rank_bytes(self, num_ranks: int) -> int:
        return _share(self.num_bytes, num_ranks)


@dataclass(frozen=True, kw_only=True)
class CheckpointSize:
    """What a checkpoint is made of; every tensor counts once, whatever the number of ranks."""

    components: tuple[Component, ...]

    def num_bytes(self, kind: str | None = None) -> int:
        """Bytes of the components of that kind, or of all."""
        return sum(one.num_bytes for one in self.components if kind in (None, one.kind))

    def per_rank_bytes(self, num_ranks: int, kind: str | None = None) -> int:
        """The largest share of a rank when each tensor is split evenly over all ranks, rounded up.

        True of `fully_shard` over all ranks, but for the padding of each tensor to the number of
        ranks. It is not what a rank holds under HSDP, where `num_ranks` is one shard group.
        """
        return _share(self.num_bytes(kind), num_ranks)


def checkpoint_size(
    num_params: int,
    *,
    dtype: str = "bf16",
    optimizer: str = "adamw",
    master: bool | None = None,
    ema: bool = False,
) -> CheckpointSize:
    """The components of a checkpoint of a model with that many parameters, kept in `dtype`.

    Args:
        num_params: parameters, each counted once (tied ones too).
        dtype: what the parameters are *stored* in. Under FSDP2's `MixedPrecisionPolicy` that is
            fp32 whatever they are computed in, and there is no second copy.
        optimizer: one of `OPTIMIZER_STATE`.
        master: whether the optimizer keeps an fp32 copy of the parameters beside them, as
            mixed-precision optimizers do. The default is to, for parameters narrower than fp32.
            Without it the optimizer's own tensors are in `dtype`, as torch.optim makes them.
        ema: whether an average of the parameters is kept, in fp32 or wider: a narrower one would
            round most of its small updates away.

    Raises:
        ValueError: a number below 1, an unknown name, or a master copy that would be no wider.
    """
    if num_params < 1:
        raise ValueError(f"a model has at least 1 parameter; found {num_params}")
    _known("dtype", dtype, DTYPE_BYTES)
    _known("optimizer", optimizer, OPTIMIZER_STATE)
    wide = dtype if DTYPE_BYTES[dtype] >= DTYPE_BYTES["fp32"] else "fp32"
    if master and wide == dtype:
        raise ValueError(
            f"master weights are an fp32 copy of narrower parameters; these are {dtype} already: "
            "leave the copy out"
        )
    has_master = wide != dtype if master is None else master
    parts = [("parameters", "parameters", dtype)]
    if has_master:
        parts.append(("optimizer", "master weights", wide))
    state_dtype = wide if has_master else dtype
    parts += [("optimizer", name, state_dtype) for name in OPTIMIZER_STATE[optimizer]]
    if ema:
        parts.append(("ema", "average", wide))
    return CheckpointSize(
        components=tuple(
            Component(kind=kind, name=name, dtype=kept, num_bytes=num_params * DTYPE_BYTES[kept])
            for kind, name, kept in parts
        )
    )


def _known(what: str, name: str, names: Mapping[str, object]) -> None:
    if name not in names:
        raise ValueError(f"unknown {what} {name!r}; known: {', '.join(sorted(names))}")


def _share(num_bytes: int, num_ranks: int) -> int:
    if num_ranks < 1:
        raise ValueError(f"there is at least 1 rank; found {num_ranks}")
    return -(-num_bytes // num_ranks)
