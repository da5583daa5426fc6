"""A padding micro-batch: the shape of a real one, with nothing valid in it.

A rank that is short of samples in a step still has to run as many forwards and backwards as the
others, or their collectives wait for ever. What makes a batch weigh nothing depends on its loss:
the defaults here know torch's convention, integer labels whose value -100 is ignored. Must not
import ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

IGNORED_LABEL = -100


def labels_of(batch: Any) -> torch.Tensor | None:
    """The labels of a mapping with "labels" or of a pair (inputs, labels); None without such.

    Only signed integer tensors count: no other type can hold -100.
    """
    if isinstance(batch, Mapping):
        labels = batch.get("labels")
    elif isinstance(batch, (tuple, list)) and len(batch) == 2:
        labels = batch[1]
    else:
        labels = None
    if not isinstance(labels, torch.Tensor) or not labels.dtype.is_signed:
        return None
    return None if labels.is_floating_point() or labels.is_complex() else labels


def ignore_labels(batch: Any) -> Any:
    """The batch with every label set to -100, in a mapping in place.

    Raises ValueError for a batch without labels as `labels_of` finds them.
    """
    labels = labels_of(batch)
    if labels is None:
        raise ValueError(
            "cannot make a padding micro-batch: expected a dict with integer 'labels' or a pair "
            f"(inputs, integer labels), found {describe(batch)}. At a world size that does not "
            "divide the global batch some ranks have fewer samples, and run such a batch instead, "
            "or the others would wait for them for ever. Pass pad=, a function that takes a batch "
            "and returns it with nothing valid for your loss, and count_tokens= to match"
        )
    ignored = torch.full_like(labels, IGNORED_LABEL)
    if isinstance(batch, Mapping):
        batch["labels"] = ignored  # type: ignore[index]  # collate functions return mutable ones
        return batch
    if hasattr(batch, "_fields"):
        return type(batch)(batch[0], ignored)
    return type(batch)([batch[0], ignored])


def describe(batch: Any) -> str:
    """The type of a batch and of what it holds, for error messages."""
    name = type(batch).__name__
    if isinstance(batch, torch.Tensor):
        return f"{name} of {batch.dtype} and shape {tuple(batch.shape)}"
    if isinstance(batch, Mapping):
        items = ", ".join(f"{key!r}: {_leaf(value)}" for key, value in batch.items())
        return f"{name} with {{{items}}}"
    if isinstance(batch, (tuple, list)):
        return f"{name} of ({', '.join(_leaf(value) for value in batch)})"
    return name


def _leaf(value: Any) -> str:
    return str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__
