"""Dense -> mixture of experts by copying the FFN ("sparse upcycling", arXiv:2212.05055).

Every expert is a copy of the dense model's FFN and the router is random. Because the chosen experts' weights are
normalised to sum to 1, the mixture computes what the dense FFN computes: the new model's logits equal the dense
model's up to rounding, whatever the router picks. That makes a real MoE with a known right answer at step 0.

Llama and Mistral become Mixtral, Qwen3 becomes Qwen3-MoE: the attention, norms, rope and embeddings of these pairs are
the same, so only the FFN tensors change names. The tensors are written in the layout of the published checkpoints (one
2-D tensor per expert and projection), which is also what transformers 5 saves.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from coati_ext.checkpoint_io.hf_directory import (
    CONFIG_NAME,
    ShardWriter,
    copy_side_files,
    new_directory,
    open_shard,
    weight_files,
)

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, kw_only=True)
class _Family:
    """Where the tensors of one layer's FFN go in a MoE architecture; `{e}` is the expert."""

    model_type: str
    architecture: str
    expert_names: dict[str, str]
    router_name: str
    attention_norms: tuple[str, ...] = ()
    holds_attention_bias: bool = False


_MIXTRAL = _Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    expert_names={
        "gate_proj": "block_sparse_moe.experts.{e}.w1.weight",
        "up_proj": "block_sparse_moe.experts.{e}.w3.weight",
        "down_proj": "block_sparse_moe.experts.{e}.w2.weight",
    },
    router_name="block_sparse_moe.gate.weight",
)
_QWEN3_MOE = _Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    expert_names={projection: f"mlp.experts.{{e}}.{projection}.weight" for projection in _PROJECTIONS},
    router_name="mlp.gate.weight",
    attention_norms=("q_norm", "k_norm"),
    holds_attention_bias=True,
)
_FAMILIES = {"llama": _MIXTRAL, "mistral": _MIXTRAL, "qwen3": _QWEN3_MOE}
_REFUSED = {"qwen2": "its q, k and v biases have no place in Mixtral, and Qwen2-MoE adds a shared expert"}


@dataclass(frozen=True, kw_only=True)
class UpcycleResult:
    """Parameter counts; `active` is what one token uses. Tied embeddings count once."""

    dense_model_type: str
    moe_model_type: str
    num_params_dense: int
    num_params_moe: int
    num_params_active: int


def upcycle(
    dense_dir: str | Path,
    moe_dir: str | Path,
    *,
    num_experts: int = 4,
    top_k: int = 2,
    seed: int = 0,
    noise_std: float = 0.0,
    overwrite: bool = False,
) -> UpcycleResult:
    """Write to `moe_dir` the MoE whose experts are copies of the FFN of the dense model in `dense_dir`.

    Args:
        seed: of the routers (normal, standard deviation `initializer_range`) and of the noise.
        noise_std: noise added to each expert, in units of the standard deviation of the matrix it is added to. 0 keeps
            the experts equal and the logits exact; about 0.01 to 0.1 lets full fine-tuning tell the experts apart.

    Raises:
        FileNotFoundError: no model in `dense_dir`.
        FileExistsError: `moe_dir` is not empty and `overwrite` is not set.
        ValueError: an architecture, option or tensor that the MoE cannot hold, by name.
        OSError: not enough disk.
    """
    dense_dir, moe_dir = Path(dense_dir), Path(moe_dir)
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k} and num_experts={num_experts}: expected 1 <= top_k <= num_experts")
    if num_experts < 2:
        raise ValueError(f"num_experts={num_experts}: a mixture needs at least 2")
    if noise_std < 0:
        raise ValueError(f"noise_std={noise_std}: expected 0 or more")
    if moe_dir.resolve() == dense_dir.resolve():
        raise ValueError(f"the output directory {moe_dir} is the dense model's own directory; choose another")

    config = _dense_config(dense_dir)
    family = _FAMILIES[config.model_type]
    files = _checked_files(config, family, weight_files(dense_dir), dense_dir)
    moe = moe_config(config, num_experts=num_experts, top_k=top_k)

    num_params, num_ffn_params, num_bytes, num_ffn_bytes = _sizes(files)
    num_router_params = config.num_hidden_layers * num_experts * config.hidden_size
    needed_bytes = num_bytes + (num_experts - 1) * num_ffn_bytes + 4 * num_router_params
    with new_directory(moe_dir, needed_bytes=needed_bytes, overwrite=overwrite) as directory:
        writer = ShardWriter(directory)
        for name, file in files.items():
            with open_shard(file) as shard:
                tensor = shard.get_tensor(name)
            for moe_name, copy in _moe_tensors(name, tensor, moe, family, seed=seed, noise_std=noise_std):
                writer.add(moe_name, copy)
        writer.close()
        moe.save_pretrained(directory)
        copy_side_files(dense_dir, directory)

    return UpcycleResult(
        dense_model_type=config.model_type,
        moe_model_type=family.model_type,
        num_params_dense=num_params,
        num_params_moe=num_params + (num_experts - 1) * num_ffn_params + num_router_params,
        num_params_active=num_params + (top_k - 1) * num_ffn_params + num_router_params,
    )


def moe_config(dense: PreTrainedConfig, *, num_experts: int, top_k: int) -> PreTrainedConfig:
    """The MoE's config: all that the two architectures share carried over, experts and top-k set."""
    family = _FAMILIES[dense.model_type]
    config_class = CONFIG_MAPPING[family.model_type]
    own = {"model_type", "architectures", "transformers_version"}
    shared = {k: v for k, v in dense.to_dict().items() if k in config_class().to_dict() and k not in own}
    shared |= {"head_dim": dense.head_dim, "num_local_experts": num_experts, "num_experts_per_tok": top_k}
    if family is _QWEN3_MOE:
        shared |= {"moe_intermediate_size": dense.intermediate_size, "norm_topk_prob": True}
    config = config_class(**shared)
    config.architectures = [family.architecture]
    return config


@torch.no_grad()
def max_logit_diff(dense_dir: str | Path, moe_dir: str | Path, token_ids_BS: list[list[int]] | torch.Tensor) -> float:
    """Largest absolute difference of the two models' logits on these tokens, both in float32; the step-0 parity check.

    Loads one model at a time. Raises ValueError if a tensor did not load or a logit is not finite.
    """
    token_ids_BS = torch.as_tensor(token_ids_BS)
    dense_logits_BSV, moe_logits_BSV = (_logits(Path(path), token_ids_BS) for path in (dense_dir, moe_dir))
    return (dense_logits_BSV - moe_logits_BSV).abs().max().item()


def _logits(model_dir: Path, token_ids_BS: torch.Tensor) -> torch.Tensor:
    model, info = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    problems = {kind: sorted(names) for kind, names in info.items() if names and kind.endswith("_keys")}
    if problems:
        raise ValueError(f"{model_dir} did not load completely: {problems}")
    logits_BSV = model.eval()(token_ids_BS).logits
    if not logits_BSV.isfinite().all():
        raise ValueError(f"{model_dir} gives logits that are not finite; its weights are damaged")
    return logits_BSV


def _dense_config(dense_dir: Path) -> PreTrainedConfig:
    if not (dense_dir / CONFIG_NAME).is_file():
        raise FileNotFoundError(f"{dense_dir} has no {CONFIG_NAME}; expected a local Hugging Face model directory")
    config = AutoConfig.from_pretrained(dense_dir, local_files_only=True)
    kind = config.model_type
    accepted = "accepted: " + ", ".join(_FAMILIES)
    if kind in {family.model_type for family in _FAMILIES.values()} or getattr(config, "num_experts_per_tok", None):
        raise ValueError(f"{dense_dir} is a {kind} model, which has experts already; a dense model is needed")
    if kind not in _FAMILIES:
        raise ValueError(f"{dense_dir} is a {kind} model: {_REFUSED.get(kind, 'no MoE with its layers')}; {accepted}")
    if getattr(config, "quantization_config", None):
        raise ValueError(f"{dense_dir} is quantised; cast it to bf16 first (applications/fp8_cast_bf16.py for FP8)")
    if getattr(config, "mlp_bias", False):
        raise ValueError(f"{dense_dir} has mlp_bias=True, and {_FAMILIES[kind].model_type} experts have no bias")
    if getattr(config, "attention_bias", False) and not _FAMILIES[kind].holds_attention_bias:
        raise ValueError(f"{dense_dir} has attention_bias=True, which {_FAMILIES[kind].model_type} cannot hold")
    if kind == "qwen3" and "sliding_attention" in config.layer_types:
        raise ValueError(f"{dense_dir} has use_sliding_window=True, which is not carried over to qwen3_moe")
    return config


def _checked_files(
    config: PreTrainedConfig, family: _Family, files: dict[str, Path], dense_dir: Path
) -> dict[str, Path]:
    """`files` in model order; ValueError if a tensor is missing or would be left behind."""
    attention = [f"self_attn.{p}_proj.weight" for p in "qkvo"]
    if getattr(config, "attention_bias", False):
        attention += [f"self_attn.{p}_proj.bias" for p in "qkvo"]
    attention += [f"self_attn.{norm}.weight" for norm in family.attention_norms]
    per_layer = ["input_layernorm.weight", *attention, "post_attention_layernorm.weight"]
    per_layer += [f"mlp.{projection}.weight" for projection in _PROJECTIONS]
    layers = [f"model.layers.{layer}.{name}" for layer in range(config.num_hidden_layers) for name in per_layer]
    names = ["model.embed_tokens.weight", *layers, "model.norm.weight"]
    if not config.tie_word_embeddings or "lm_head.weight" in files:
        names.append("lm_head.weight")

    # Old Llama checkpoints carry the rope frequencies, which transformers computes from the config.
    extra = sorted(name for name in files.keys() - set(names) if not name.endswith("rotary_emb.inv_freq"))
    missing = sorted(set(names) - files.keys())
    for problem, found in (("missing", missing), ("not known to this architecture", extra)):
        if found:
            shown = ", ".join(found[:4]) + (" ..." if len(found) > 4 else "")
            raise ValueError(f"{dense_dir}: {len(found)} tensors {problem} ({config.model_type}): {shown}")
    return {name: files[name] for name in names}


def _moe_tensors(
    name: str, tensor: torch.Tensor, config: PreTrainedConfig, family: _Family, *, seed: int, noise_std: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """The MoE's tensors made from one dense tensor; the router comes with `down_proj`, the last of its layer."""
    prefix, _, projection = name.removesuffix(".weight").rpartition(".mlp.")
    if projection not in _PROJECTIONS:
        yield name, tensor
        return
    for e in range(config.num_local_experts):
        expert_name = f"{prefix}.{family.expert_names[projection].format(e=e)}"
        expert = tensor.clone()
        if noise_std:
            noise = _normal(expert_name, expert.shape, seed).mul_(noise_std * tensor.float().std())
            expert = (tensor.float() + noise).to(tensor.dtype)
        yield expert_name, expert
    if projection == "down_proj":
        router_name = f"{prefix}.{family.router_name}"
        router_EH = _normal(router_name, (config.num_local_experts, config.hidden_size), seed)
        yield router_name, router_EH.mul_(config.initializer_range).to(tensor.dtype)


def _normal(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Standard normal values that depend on the seed and the tensor's name only, not on the order of writing."""
    # torch's CPU generator uses the low 32 bits of a seed only, so both go into them.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.randn(shape, generator=generator)


def _sizes(files: dict[str, Path]) -> tuple[int, int, int, int]:
    """(parameters, FFN parameters, bytes, FFN bytes) from the safetensors headers."""
    num_params = num_ffn_params = num_bytes = num_ffn_bytes = 0
    for name, file in files.items():
        with open_shard(file) as shard:
            tensor = shard.get_slice(name)
            count, dtype = torch.Size(tensor.get_shape()).numel(), tensor.get_dtype()
        if dtype not in _BYTES:
            raise ValueError(f"{file}: {name} is {dtype}; expected one of {', '.join(_BYTES)}")
        size = count * _BYTES[dtype]
        num_params, num_bytes = num_params + count, num_bytes + size
        if ".mlp." in name:
            num_ffn_params, num_ffn_bytes = num_ffn_params + count, num_ffn_bytes + size
    return num_params, num_ffn_params, num_bytes, num_ffn_bytes
