"""FP8 checkpoints with DeepSeek-V3's tensor names and shapes and random weights, as large as asked."""

import itertools
import json
import math
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import DeepseekV3Config

from coati_ext.checkpoint_io.hf_directory import CONFIG_NAME, INDEX_NAME
from coati_ext.checkpoint_io.safetensors_file import make_header, num_bytes
from coati_ext.checkpoint_io.stream import TensorSpec
from coati_ext.checkpoint_io.workers import bytes_of

SHARD_BYTES = 4_300_000_000  # of the published checkpoint's 163 shards
BLOCK = 128
_FP8, _BF16, _FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32


def deepseek_v3_tensors(config: DeepseekV3Config) -> dict[str, TensorSpec]:
    """Names, shapes and dtypes as published, in that order, with the MTP layers that the config has."""
    c, tensors = config, {}

    def add(name: str, *shape: int, dtype: torch.dtype = _BF16) -> None:
        tensors[name] = TensorSpec(name=name, dtype=dtype, shape=shape)

    def fp8(name: str, rows: int, columns: int) -> None:
        add(f"{name}.weight", rows, columns, dtype=_FP8)
        add(f"{name}.weight_scale_inv", math.ceil(rows / BLOCK), math.ceil(columns / BLOCK), dtype=_FP32)

    def mlp(name: str, width: int) -> None:
        fp8(f"{name}.gate_proj", width, c.hidden_size)
        fp8(f"{name}.up_proj", width, c.hidden_size)
        fp8(f"{name}.down_proj", c.hidden_size, width)

    def attention(name: str) -> None:
        fp8(f"{name}.q_a_proj", c.q_lora_rank, c.hidden_size)
        add(f"{name}.q_a_layernorm.weight", c.q_lora_rank)
        fp8(f"{name}.q_b_proj", c.num_attention_heads * c.qk_head_dim, c.q_lora_rank)
        fp8(f"{name}.kv_a_proj_with_mqa", c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size)
        add(f"{name}.kv_a_layernorm.weight", c.kv_lora_rank)
        fp8(f"{name}.kv_b_proj", c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
        fp8(f"{name}.o_proj", c.hidden_size, c.num_attention_heads * c.v_head_dim)

    add("model.embed_tokens.weight", c.vocab_size, c.hidden_size)
    for i in range(c.num_hidden_layers + c.num_nextn_predict_layers):
        layer = f"model.layers.{i}"
        attention(f"{layer}.self_attn")
        add(f"{layer}.input_layernorm.weight", c.hidden_size)
        add(f"{layer}.post_attention_layernorm.weight", c.hidden_size)
        if i < c.first_k_dense_replace:
            mlp(f"{layer}.mlp", c.intermediate_size)
            continue
        add(f"{layer}.mlp.gate.weight", c.n_routed_experts, c.hidden_size)
        add(f"{layer}.mlp.gate.e_score_correction_bias", c.n_routed_experts, dtype=_FP32)
        mlp(f"{layer}.mlp.shared_experts", c.n_shared_experts * c.moe_intermediate_size)
        for expert in range(c.n_routed_experts):
            mlp(f"{layer}.mlp.experts.{expert}", c.moe_intermediate_size)
        if i >= c.num_hidden_layers:
            add(f"{layer}.embed_tokens.weight", c.vocab_size, c.hidden_size)
            add(f"{layer}.enorm.weight", c.hidden_size)
            add(f"{layer}.hnorm.weight", c.hidden_size)
            add(f"{layer}.eh_proj.weight", c.hidden_size, 2 * c.hidden_size)
            add(f"{layer}.shared_head.norm.weight", c.hidden_size)
            add(f"{layer}.shared_head.head.weight", c.vocab_size, c.hidden_size)
    add("model.norm.weight", c.hidden_size)
    add("lm_head.weight", c.vocab_size, c.hidden_size)
    return tensors


def write_checkpoint(directory: Path, num_bytes_wanted: int, *, shard_bytes: int = SHARD_BYTES, **sizes: int) -> int:
    """Write a checkpoint of at least so many bytes and return how many it has; values are random, and repeat.

    Layers are added until the size is reached, then experts taken away while it still is.

    Args:
        sizes: of `DeepseekV3Config`, where they shall not be the published ones.
    """
    config = _smallest(num_bytes_wanted, sizes)
    tensors = deepseek_v3_tensors(config)
    directory.mkdir(parents=True)
    shards: list[list[TensorSpec]] = [[]]
    for spec in tensors.values():
        if _total(shards[-1]) > shard_bytes:
            shards.append([])
        shards[-1].append(spec)
    files = [f"model-{i + 1:05d}-of-{len(shards):06d}.safetensors" for i in range(len(shards))]
    values: dict[tuple[torch.dtype, tuple[int, ...]], torch.Tensor] = {}
    for file, specs in zip(files, shards, strict=True):
        specs.sort(key=lambda spec: -spec.dtype.itemsize)
        with (directory / file).open("wb") as opened:
            opened.write(make_header([(spec.name, spec.dtype, spec.shape) for spec in specs], {"format": "pt"})[0])
            for spec in specs:
                if (spec.dtype, spec.shape) not in values:
                    values[spec.dtype, spec.shape] = _random(spec.dtype, spec.shape)
                opened.write(bytes_of(values[spec.dtype, spec.shape]))
    weight_map = {spec.name: file for file, specs in zip(files, shards, strict=True) for spec in specs}
    index = {"metadata": {"total_size": _total(tensors.values())}, "weight_map": weight_map}
    (directory / INDEX_NAME).write_text(json.dumps(index))
    content = config.to_dict() | {"architectures": ["DeepseekV3ForCausalLM"], "dtype": "bfloat16"}
    content["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    (directory / CONFIG_NAME).write_text(json.dumps(content, indent=2))
    return _total(tensors.values())


def _smallest(wanted: int, sizes: dict[str, int]) -> DeepseekV3Config:
    def config(layers: int, experts: int) -> DeepseekV3Config:
        shape = dict(
            num_hidden_layers=layers, n_routed_experts=experts, first_k_dense_replace=1, tie_word_embeddings=False
        )
        return DeepseekV3Config(**{**shape, "num_nextn_predict_layers": 0, **sizes})

    def is_enough(layers: int, experts: int) -> bool:
        return _total(deepseek_v3_tensors(config(layers, experts)).values()) >= wanted

    layers = next(layers for layers in itertools.count(2) if is_enough(layers, 256))
    return config(layers, next(experts for experts in range(8, 257, 8) if is_enough(layers, experts)))


def _total(specs: Iterable[TensorSpec]) -> int:
    return sum(num_bytes(spec.dtype, spec.shape) for spec in specs)


def _random(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(math.prod(shape))
    if dtype == _FP8:
        codes = torch.randint(0, 0x7F, shape, dtype=torch.uint8, generator=generator)  # all but NaN, positive ...
        codes |= torch.randint(0, 2, shape, dtype=torch.uint8, generator=generator) << 7  # ... or negative
        return codes.view(_FP8)
    if dtype == _FP32:
        return torch.rand(shape, generator=generator) * 1e-4 + 1e-5
    return (torch.randn(shape, generator=generator) * 0.02).to(dtype)
