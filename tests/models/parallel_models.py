"""Models, batches and comparisons of the tensor parallelism tests."""

import zlib
from typing import Any

import torch
import torch.distributed as dist
from parity import lora_config
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from coati_ext.models.lora import inject_lora

TOLERANCE = 1e-5
VOCAB = 97  # not a multiple of 2 or 4

EXTRA: dict[str, dict[str, Any]] = {
    "llama": dict(attention_bias=True, mlp_bias=True),  # of the cut and of the summed projections
    "qwen2_tied": dict(tie_word_embeddings=True),
    "qwen3": dict(head_dim=8),
    "gemma2": dict(head_dim=8, query_pre_attn_scalar=8),
    "minicpm3": dict(
        num_key_value_heads=4, q_lora_rank=12, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
        head_dim=4,
    ),
}  # fmt: skip


def config_of(family: str, **kwargs: Any):
    common = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=0,
        use_cache=False,
        initializer_range=0.2,
    )
    return AutoConfig.for_model(family.removesuffix("_tied"), **common | EXTRA.get(family, {}) | kwargs)


def whole_model(family: str, **kwargs: Any) -> nn.Module:
    """A random model, the same for every caller; biases and norms are no zeros and ones."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family, **kwargs), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def batch(length: int) -> dict[str, torch.Tensor]:
    """Three samples: whole, padded on the right and, as in generation, on the left."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(3, VOCAB, (3, length), generator=generator)
    mask, labels = torch.ones_like(ids), ids.clone()
    if length > 2:
        mask[1, -2:] = 0
        mask[2, :2] = 0
    ids[mask == 0] = 0
    labels[mask == 0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def prepare(model: nn.Module, lora: bool, dropout: float = 0.0) -> nn.Module:
    if lora:
        config = lora_config(["all"])
        config.lora_dropout = dropout
        inject_lora(model, config, seed=3)
    return model


def own_slice(whole: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    cut = getattr(parameter, "tp_cut", None)
    return whole if cut is None else whole.narrow(cut.dim, cut.start, cut.stop - cut.start)


def joined(parameter: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    """The whole of what the ranks hold; what is no slice must be alike on all."""
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, value.detach())
    cut = getattr(parameter, "tp_cut", None)
    if cut is None:
        for part in parts:
            torch.testing.assert_close(part, value.detach(), rtol=0, atol=0)
        return parts[0]
    return torch.cat(parts, dim=cut.dim)


def assert_same(found: torch.Tensor, expected: torch.Tensor, name: str, least: float = 1e-12) -> None:
    assert found.shape == expected.shape, name
    error = (found - expected).abs().max() / expected.abs().max().clamp_min(least)
    assert error <= TOLERANCE, f"{name}: {error:.2e} of its largest element"
