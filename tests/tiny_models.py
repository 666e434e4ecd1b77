"""Tiny random models of the families that the tests run on: odd enough to catch transposed or swapped dimensions."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
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


_DECODER = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=None,
    bos_token_id=1,
    eos_token_id=2,
)
_MLA = dict(
    num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
)
_INDEXER = dict(index_n_heads=24, index_head_dim=8, index_topk=4)  # few heads of relu would score many keys 0: ties
_EXPERTS = dict(moe_intermediate_size=24, num_experts=8, num_experts_per_tok=3)
_FOUR_EXPERTS = dict(intermediate_size=24, num_local_experts=4, num_experts_per_tok=2, num_hidden_layers=2)
_ROUTED = dict(moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1)
_GROUPED = dict(**_ROUTED, n_group=2, topk_group=1, first_k_dense_replace=1)
_FIRST_DENSE = dict(mlp_layer_types=["dense", "sparse", "sparse"])
_LINEAR_THEN_FULL = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])

# name: (model_type, what differs from _DECODER)
_OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": (
        "deepseek_v2",
        {**_MLA, **_GROUPED, "n_shared_experts": 2, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v2_lite": ("deepseek_v2", {**_MLA, **_ROUTED, "first_k_dense_replace": 1, "q_lora_rank": None}),
    "moonlight": (
        "deepseek_v3",
        {**_MLA, **_GROUPED, "n_shared_experts": 2, "n_group": 1, "q_lora_rank": None, "routed_scaling_factor": 2.446},
    ),
    "qwen2_moe": ("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0]}),
    "glm4_moe": ("glm4_moe", {**_GROUPED, "head_dim": 8, "use_qk_norm": True}),
    "glm4_moe_lite": ("glm4_moe_lite", {**_MLA, **_GROUPED, **_FIRST_DENSE}),
    "olmoe": ("olmoe", {**_EXPERTS, "intermediate_size": 24, "num_hidden_layers": 2}),
    "dots1": ("dots1", {**_GROUPED, "head_dim": 8, "layer_types": ["full_attention"] * 3}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            "moe_intermediate_size": 24,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            **_EXPERTS,
            **_LINEAR_THEN_FULL,
            "head_dim": 8,
            "shared_expert_intermediate_size": 40,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
    ),
    "minimax": ("minimax", {**_FOUR_EXPERTS, **_LINEAR_THEN_FULL, "head_dim": 8, "block_size": 4}),
    "minimax_m2": ("minimax_m2", {**_FOUR_EXPERTS, "head_dim": 8}),
    "hunyuan_v1_moe": (
        "hunyuan_v1_moe",
        {"intermediate_size": 24, "num_experts": 4, "moe_topk": 2, "head_dim": 8, "num_hidden_layers": 2},
    ),
    "deepseek_v32": ("deepseek_v32", {**_MLA, **_GROUPED, **_INDEXER}),
    "glm_moe_dsa": ("glm_moe_dsa", {**_MLA, **_GROUPED, **_FIRST_DENSE, **_INDEXER}),
    "solar_open": ("solar_open", {**_GROUPED, "head_dim": 8}),
    "exaone_moe": (
        "exaone_moe",
        {**_EXPERTS, "num_shared_experts": 1, "n_group": 2, "first_k_dense_replace": 1, "sliding_window": 5},
    ),
    "mellum": ("mellum", {**_EXPERTS, **_FIRST_DENSE, "head_dim": 8, "layer_types": ["full_attention"] * 3}),
    "flex_olmo": (
        "flex_olmo",
        {"intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3, "num_hidden_layers": 2},
    ),
    "afmoe": ("afmoe", {**_EXPERTS, "num_shared_experts": 2, "num_dense_layers": 1, "head_dim": 8}),
    "cohere2_moe": (
        "cohere2_moe",
        {
            "intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "prefix_dense_intermediate_size": 40,
            "logit_scale": 1.0,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "head_dim": 8,
        },
    ),
    # Refused; here to show that they are.
    "gpt_oss": ("gpt_oss", {**_FOUR_EXPERTS, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    "nemotron_h": ("nemotron_h", {**_ROUTED, "head_dim": 8, "layers_block_type": ["attention", "moe"]}),
    "phimoe": ("phimoe", _FOUR_EXPERTS),
    "granitemoe": ("granitemoe", _FOUR_EXPERTS),
    "jamba": (
        "jamba",
        {
            "num_hidden_layers": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_offset": 1,
            "mamba_d_state": 4,
        },
    ),
    "longcat_flash": (
        "longcat_flash",
        {
            **_MLA,
            "num_layers": 2,
            "head_dim": 4,
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 24,
            "n_routed_experts": 8,
            "zero_expert_num": 2,
            "moe_topk": 3,
        },
    ),
}


def _tiny(model_type: str, differing: dict[str, Any]) -> Callable[..., PreTrainedConfig]:
    return lambda **kwargs: CONFIG_MAPPING[model_type](**{**_DECODER, **differing, **kwargs})


CONFIGS = {
    "mixtral": mixtral_config,
    "qwen3_moe": qwen3_moe_config,
    "deepseek_v3": deepseek_v3_config,
    "llama": llama_config,
    **{name: _tiny(*row) for name, row in _OTHERS.items()},
}


def tiny_model(family: str, *, seed: int = 0, std: float = 0.2, **kwargs) -> PreTrainedModel:
    """A random fp32 model, the same for every caller; weights large enough (`std`) for effects to show in logits."""
    torch.manual_seed(seed)
    config = CONFIGS[family](initializer_range=std, **kwargs)
    config.use_cache = False
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def token_batch(batch: int = 3, length: int = 7, *, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))
