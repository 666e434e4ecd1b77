"""Tiny random models of the families that the tests run on: odd enough to catch transposed or swapped dimensions."""

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

VOCAB = 96


def mixtral_config(**kwargs) -> MixtralConfig:
    defaults = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )
    return MixtralConfig(**{**defaults, **kwargs})


def qwen3_moe_config(**kwargs) -> Qwen3MoeConfig:
    defaults = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=3,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        max_position_embeddings=64,
    )
    return Qwen3MoeConfig(**{**defaults, **kwargs})


def deepseek_v3_config(**kwargs) -> DeepseekV3Config:
    defaults = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        max_position_embeddings=64,
    )
    return DeepseekV3Config(**{**defaults, **kwargs})


def llama_config(**kwargs) -> LlamaConfig:
    defaults = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaConfig(**{**defaults, **kwargs})


CONFIGS = {
    "mixtral": mixtral_config,
    "qwen3_moe": qwen3_moe_config,
    "deepseek_v3": deepseek_v3_config,
    "llama": llama_config,
}


def tiny_model(family: str, *, seed: int = 0, std: float = 0.2, **kwargs) -> PreTrainedModel:
    """A random fp32 model, the same for every caller; weights large enough (`std`) for effects to show in logits."""
    torch.manual_seed(seed)
    config = CONFIGS[family](initializer_range=std, **kwargs)
    config.use_cache = False
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def token_batch(batch: int = 3, length: int = 7, *, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))
