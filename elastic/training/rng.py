"""Random streams of one rank: python, numpy, torch on CPU and on this rank's CUDA device.

Generators that a training function makes for itself and tracks are streams too. A rank either
continues the streams that were saved for it, or, when the group grew past what was saved, begins
fresh ones that nobody else has and that a second resume begins again. Must not import ray.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

__all__ = [
    "Generator",
    "InvalidStreams",
    "capture",
    "derive",
    "follow",
    "restore",
    "restore_or_derive",
]

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random

_GENERATORS = "generators"
# As the global streams are, of the process: what is tracked now.
_followed: dict[str, Generator] = {}


class InvalidStreams(ValueError):
    """Saved streams that cannot be continued; nothing was changed."""


def follow(generators: Mapping[str, Generator]) -> None:
    """From now on these are streams of this rank as well, by name, and those before are not."""
    _followed.clear()
    _followed.update(generators)


def capture() -> dict[str, Any]:
    """This rank's streams as plain values; draws nothing from them."""
    streams: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch_cpu": torch.get_rng_state().numpy().tobytes(),
    }
    if torch.cuda.is_available():
        streams["torch_cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    if _followed:
        streams[_GENERATORS] = {name: _state(one) for name, one in _followed.items()}
    return streams


def restore(streams: dict[str, Any]) -> list[str]:
    """Continues the streams that `capture` gave, bit-equal; gives the names that could not be.

    Those are the CUDA stream where either side has no CUDA device. Raises `InvalidStreams` when
    anything else is missing or malformed, and then every stream is as it was: a run that goes on
    with half its streams diverges without a sign.
    """
    before = capture()
    try:
        _set(streams)
    except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
        _set(before)
        raise InvalidStreams(
            f"the saved random streams cannot be continued: {type(error).__name__}: {error}; "
            f"expected {sorted(before)}, found {_outline(streams)}"
        ) from error
    return sorted({"torch_cuda"} & (before.keys() ^ streams.keys()))


def derive(seed: int, step: int, world_rank: int) -> None:
    """Begins fresh streams, a function of the arguments alone and different for any other ones.

    With `step` 0 they are the streams of the start of a run, to which a generator that is followed
    comes as whoever made it has seeded it.
    """
    random.seed(_number(seed, step, world_rank, "python"))
    np.random.seed([_number(seed, step, world_rank, f"numpy {i}") % 2**32 for i in range(4)])
    # manual_seed reaches every CUDA device as well, so the CUDA stream is set after it.
    torch.manual_seed(_number(seed, step, world_rank, "torch_cpu"))
    if torch.cuda.is_available():
        torch.cuda.manual_seed(_number(seed, step, world_rank, "torch_cuda"))
    if step:
        for name, generator in _followed.items():
            _seed(generator, _number(seed, step, world_rank, f"generator {name}"))


def restore_or_derive(
    streams: dict[str, Any] | None,
    seed: int,
    step: int,
    world_rank: int,
    on_left_out: Callable[[list[str]], None],
) -> None:
    """Continues the saved streams, and tells those that could not be; fresh ones without any.

    The group may be larger than the one that saved: each time the same streams begin. A stream
    that was not saved, as of a CUDA device that was not there, begins fresh as well: what a
    process starts with is the same on all ranks.
    """
    derive(seed, step, world_rank)
    if streams is not None and (left_out := restore(streams)):
        on_left_out(left_out)


def _set(streams: dict[str, Any]) -> None:
    random.setstate(streams["python"])
    np.random.set_state(streams["numpy"])
    torch.set_rng_state(_byte_tensor(streams["torch_cpu"]))
    if torch.cuda.is_available() and "torch_cuda" in streams:
        torch.cuda.set_rng_state(_byte_tensor(streams["torch_cuda"]))
    saved = streams.get(_GENERATORS, {})
    for name in _followed.keys() & saved.keys():
        _set_state(_followed[name], saved[name])


def _state(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _set_state(generator: Generator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(_byte_tensor(state))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _seed(generator: Generator, number: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(number)
    elif isinstance(generator, np.random.Generator):
        # It has no way to be seeded again; another of its kind has.
        generator.bit_generator.state = type(generator.bit_generator)(number).state
    elif isinstance(generator, random.Random):
        generator.seed(number)
    else:
        generator.seed([number >> 32, number & 0xFFFFFFFF])


def _byte_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _number(seed: int, step: int, world_rank: int, stream: str) -> int:
    text = f"elastic random stream\n{seed}\n{step}\n{world_rank}\n{stream}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _outline(streams: object) -> object:
    return sorted(map(str, streams)) if isinstance(streams, dict) else type(streams).__name__
