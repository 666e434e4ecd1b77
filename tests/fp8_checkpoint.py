"""Block-scaled FP8 checkpoints of tiny models, made without any code of ours: what the converters are tested on."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_models import tiny_model

BLOCK = (128, 128)
# Ragged like the published model: kv_a_proj_with_mqa has 128 + 64 rows, moe_intermediate_size is no multiple of 128.
RAGGED = dict(
    hidden_size=256, intermediate_size=320, moe_intermediate_size=136, num_attention_heads=2, num_key_value_heads=2,
    q_lora_rank=136, kv_lora_rank=128, qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=40, n_routed_experts=4,
    n_group=2, num_hidden_layers=2, std=0.05,
)  # fmt: skip


def quantize(weight: torch.Tensor, block: tuple[int, int] = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3, scales), block by block in plain loops."""
    num_rows, num_columns = weight.shape
    scale = torch.ones(math.ceil(num_rows / block[0]), math.ceil(num_columns / block[1]))
    quantised = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            rows, columns = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            piece = weight[rows, columns].float()
            scale[i, j] = piece.abs().max() / 448
            quantised[rows, columns] = (piece / scale[i, j]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return quantised, scale


def dequantize(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] = BLOCK) -> torch.Tensor:
    """float64 values, by the block of each row and column."""
    rows = torch.arange(weight.shape[0]) // block[0]
    columns = torch.arange(weight.shape[1]) // block[1]
    return weight.float().double() * scale.float().double()[rows][:, columns]


def fp8_state_dict(weights: dict[str, torch.Tensor], block: tuple[int, int] = BLOCK) -> dict[str, torch.Tensor]:
    """The tensors as DeepSeek publishes them: linear weights FP8 with scales, others in bf16."""
    result = {}
    for name, weight in weights.items():
        kept = ("embed_tokens", "lm_head", "gate.weight", "norm", "e_score_correction_bias", "eh_proj")
        if weight.dim() == 2 and not any(part in name for part in kept):
            result[name], result[name + "_scale_inv"] = quantize(weight, block)
        else:
            result[name] = weight.float() if "e_score_correction_bias" in name else weight.bfloat16()
    return result


def save_sharded(tensors: dict[str, torch.Tensor], directory: Path, num_shards: int = 3) -> None:
    """Shards such that some scales are in another shard than their weight, and an index."""
    directory.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    files = {i: f"model-{i + 1:05d}-of-{num_shards:06d}.safetensors" for i in range(num_shards)}
    weight_map = {name: files[place * 3 // 4 % num_shards] for place, name in enumerate(names)}
    for file in files.values():
        save_file({n: tensors[n] for n in names if weight_map[n] == file}, directory / file, metadata={"format": "pt"})
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def make_fp8_dir(
    directory: Path, family: str = "deepseek_v3", *, mtp: bool = False, num_shards: int = 3, **config
) -> dict[str, torch.Tensor]:
    """Write a model directory with config, generation config and something for a tokenizer; returns its tensors."""
    model = tiny_model(family, **{**(RAGGED if family == "deepseek_v3" else {}), **config})
    reference = directory.with_name(directory.name + "-bf16")
    model.save_pretrained(reference)  # which writes the names that published checkpoints have
    from safetensors.torch import load_file

    weights = {}
    for file in sorted(reference.glob("*.safetensors")):
        weights |= load_file(file)
    if mtp:
        layer = model.config.num_hidden_layers
        weights |= {
            name.replace(f".layers.{layer - 1}.", f".layers.{layer}."): weight.clone()
            for name, weight in weights.items()
            if f".layers.{layer - 1}." in name
        }
        weights[f"model.layers.{layer}.eh_proj.weight"] = torch.randn(256, 512)
    tensors = fp8_state_dict(weights)
    save_sharded(tensors, directory, num_shards)
    content = json.loads((reference / "config.json").read_text())
    content |= {"num_nextn_predict_layers": int(mtp), "torch_dtype": "bfloat16", "dtype": "bfloat16"}
    content["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK),
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(content))
    (directory / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6}')
    (directory / "tokenizer_config.json").write_text("{}")
    (directory / "modeling_own.py").write_text("x = 1\n")
    return tensors
