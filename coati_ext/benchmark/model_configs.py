"""Published config.json files, as far as they make shapes, by the name of the model."""

import json
import tempfile
from pathlib import Path
from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256, "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
        "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True,
        "max_position_embeddings": 163840, "rope_theta": 10000, "tie_word_embeddings": False,
    },
    "qwen3_30b_a3b": {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "max_position_embeddings": 40960, "rope_theta": 1e6, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "tie_word_embeddings": False,
    },
}  # fmt: skip


def model_config(name: str, num_layers: int | None = None) -> dict[str, Any]:
    """Of one of `MODELS`, or of a file that is a config.json or a directory with one; with its first layers.

    Raises:
        ValueError: neither, a config.json that makes no model, or more layers than it has.
    """
    if name in MODELS:
        found = dict(MODELS[name])
    else:
        file = Path(name, "config.json") if Path(name).is_dir() else Path(name)
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"--model {name}: neither {', '.join(MODELS)} nor a config.json: {error}") from None
        for key, kind in (("model_type", str), ("num_hidden_layers", int), ("vocab_size", int)):
            if not isinstance(found, dict) or not isinstance(found.get(key), kind):
                raise ValueError(
                    f"--model {name}: {key} is missing or no {kind.__name__}: no config of a language model"
                )
    if num_layers is not None:
        has = found["num_hidden_layers"]
        if not 1 <= num_layers <= has:
            raise ValueError(f"--num_layers {num_layers}: the model has {has}")
        found["num_hidden_layers"] = num_layers
    if name not in MODELS:
        _try(name, found)
    return found


def _try(name: str, config: dict[str, Any]) -> None:
    import torch

    from coati_ext.checkpoint_io.load import CONFIG_ERRORS, build_meta_model

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        try:
            build_meta_model(folder, torch.float32)
        except CONFIG_ERRORS as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"--model {name}: the config makes no model: {reason}") from error
