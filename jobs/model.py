"""The model of our jobs: a decoder-only transformer, plain PyTorch that knows nothing of ranks.

Blocks of RMSNorm, causal attention with rotary positions (Su et al., RoFormer, 2021) and a gated
MLP (Shazeer, GLU Variants Improve Transformer, 2020), in `layers`, so that a job can shard it block
by block. Must not import ray.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F

IGNORED_LABEL = -100
INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of a transformer. Any sequence length will do; positions are relative.

    Raises ValueError for sizes that do not make a model.
    """

    vocab_size: int = 257
    dim: int = 160
    num_layers: int = 4
    num_heads: int = 4
    mlp_dim: int = 432
    dropout: float = 0.0
    tie_embeddings: bool = False
    rope_base: float = 10_000.0

    def __post_init__(self) -> None:
        sizes = (self.vocab_size, self.dim, self.num_layers, self.num_heads, self.mlp_dim)
        if min(sizes) < 1:
            raise ValueError(f"all sizes of a model must be 1 or more, found {self}")
        if self.dim % (2 * self.num_heads):
            raise ValueError(
                f"dim must be a multiple of 2 * num_heads = {2 * self.num_heads}, found {self.dim}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be in 0 .. 1, 1 excluded, found {self.dropout}")


# Parameters at a vocabulary of 257: 43 k (to try out failures), 1.3 M, 26 M, 85 M, 304 M, 1.2 G.
PRESETS: Mapping[str, ModelConfig] = {
    "nano": ModelConfig(dim=32, num_layers=2, num_heads=2, mlp_dim=96),
    "tiny": ModelConfig(),
    "small": ModelConfig(dim=512, num_layers=8, num_heads=8, mlp_dim=1376),
    "base": ModelConfig(dim=768, num_layers=12, num_heads=12, mlp_dim=2048),
    "large": ModelConfig(dim=1024, num_layers=24, num_heads=16, mlp_dim=2752),
    "xl": ModelConfig(dim=2048, num_layers=24, num_heads=16, mlp_dim=5504),
}


class Transformer(nn.Module):
    """Token ids (batch, sequence), int64, to logits (batch, sequence, vocab_size)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-6)
        # A tied head reads the embedding: two names of one parameter would come apart in to_empty.
        self.head = (
            None if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)
        )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        hidden = F.dropout(hidden, self.config.dropout, self.training)
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = self.norm(hidden)
        if self.head is None:
            return F.linear(hidden, self.embedding.weight)
        logits: torch.Tensor = self.head(hidden)
        return logits


class Block(nn.Module):
    """One layer: (batch, sequence, dim) to the same shape."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.mlp = GatedMlp(config)
        self.dropout = config.dropout

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self._drop(self.attention(self.attention_norm(hidden)))
        return hidden + self._drop(self.mlp(self.mlp_norm(hidden)))

    def _drop(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.dropout(hidden, self.dropout, self.training)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.rope_base = config.rope_base
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, dim = hidden.shape
        qkv = self.qkv(hidden).view(batch, length, 3, self.num_heads, dim // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        cos, sin = _rotation(length, dim // self.num_heads, self.rope_base, hidden)
        mixed = F.scaled_dot_product_attention(
            _rotated(query, cos, sin),
            _rotated(key, cos, sin),
            value,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        projected: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        return projected


def _rotation(
    length: int, head_dim: int, base: float, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    # Made anew in each forward: a buffer would have to survive meta devices and checkpoints.
    dtype = torch.promote_types(like.dtype, torch.float32)
    powers = torch.arange(0, head_dim, 2, device=like.device, dtype=dtype) / head_dim
    positions = torch.arange(length, device=like.device, dtype=dtype)
    angles = torch.outer(positions, base**-powers)
    return angles.cos(), angles.sin()


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Each pair (i, i + head_dim / 2) of (..., sequence, head_dim) turned by its angle."""
    first, second = heads.to(cos.dtype).chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(heads.dtype)


class GatedMlp(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.dim, 2 * config.mlp_dim, bias=False)
        self.down = nn.Linear(config.mlp_dim, config.dim, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        projected: torch.Tensor = self.down(F.silu(gate) * up)
        return projected


def build(
    config: ModelConfig,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Transformer:
    """A model whose parameters are a function of (config, seed) alone, rounded to `dtype`.

    On device "meta" they are left without values: shard the model, `model.to_empty(device=...)`,
    then `initialise(model, seed)` gives it the same ones, whatever the sharding.
    """
    with torch.device("meta"):
        model = Transformer(config).to(dtype)
    if torch.device(device).type != "meta":
        model.to_empty(device=device)
        initialise(model, seed)
    return model


@torch.no_grad()
def initialise(model: Transformer, seed: int) -> None:
    """Sets all parameters, sharded ones too, as a function of (config, seed).

    Each is drawn whole on the CPU in float32 from a stream of its own, named by the parameter, and
    every rank keeps its part: no communication, and the world size changes nothing. The random
    streams of the process are not touched. Projections back into the residual stream are scaled
    down with depth (Radford et al., GPT-2, 2019).
    """
    residual_std = INIT_STD / math.sqrt(2 * model.config.num_layers)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            values = torch.ones(parameter.shape)
        else:
            is_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            std = residual_std if is_residual else INIT_STD
            values = torch.empty(parameter.shape, device="cpu")
            values.normal_(0.0, std, generator=_stream(seed, name))
        _assign(parameter, values)


def _stream(seed: int, name: str) -> torch.Generator:
    digest = hashlib.blake2b(f"parameter/{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def _assign(parameter: torch.Tensor, values: torch.Tensor) -> None:
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        values = values.to(device=mesh.device_type, dtype=parameter.dtype)
        # No source rank: all ranks hold the same values already.
        share = distribute_tensor(values, mesh, placements, src_data_rank=None)
        parameter.to_local().copy_(share.to_local())
    else:
        parameter.copy_(values)


def loss_sum(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Cross entropy in nats, summed over the labels other than -100; 0 when there are none.

    batch: `input_ids` and `labels`, int64 (batch, sequence), labels already moved by one
    """
    logits = model(batch["input_ids"]).flatten(0, 1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    labels = batch["labels"].flatten()
    return F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED_LABEL)
