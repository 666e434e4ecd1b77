"""Tokens per second of `coati_ext.models.generation.generate`, with and without CUDA graphs.

The model has SmolLM2-135M's shape and random weights, in bf16 on a GPU and fp32 on a CPU; with experts, each of them is
half as wide, and a token takes two. No completion ends before its limit, so that every turn has all rows.
"""

import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedModel

from coati_ext.models.decode_graph import can_capture
from coati_ext.models.generation import Sampling, generate
from coati_ext.moe.experts import shard_experts

_SHAPE = dict(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
)  # fmt: skip
_PROMPT_TOKENS = (30, 120)  # the shortest and the longest prompt
_WARMUP = (4, 2, 32)  # prompts, completions, tokens


def compare(num_prompts: int, num_generations: int, max_seq_len: int, num_experts: int = 0) -> str:
    """A line for each way that this device has.

    Raises:
        ValueError: a number below 1, or one expert; names the flag.
    """
    if num_experts < 0 or num_experts == 1:
        raise ValueError(f"--num_experts must be 0 (dense) or at least 2, got {num_experts}")
    numbers = {"num_prompts": num_prompts, "num_generations": num_generations, "max_seq_len": max_seq_len}
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    on_gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = _model(num_experts).to("cuda" if on_gpu else "cpu", dtype).eval()
    device = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} thread(s)"
    kind = f"{num_experts} experts, " if num_experts else ""
    lines = [f"{num_prompts} prompts x {num_generations} completions of {max_seq_len} tokens, {kind}{dtype}, {device}"]
    for graphs in (True, False) if can_capture(model)[0] else (False,):
        measure(model, *_WARMUP, graphs=graphs)
        rate = measure(model, num_prompts, num_generations, max_seq_len, graphs=graphs)
        lines.append(f"{'with' if graphs else 'without'} CUDA graphs: {rate:,.0f} tokens/s")
    return "\n".join(lines)


def _model(num_experts: int) -> PreTrainedModel:
    if not num_experts:
        return AutoModelForCausalLM.from_config(LlamaConfig(**_SHAPE))
    shape = {**_SHAPE, "intermediate_size": _SHAPE["intermediate_size"] // 2}
    model = AutoModelForCausalLM.from_config(MixtralConfig(**shape, num_local_experts=num_experts))
    shard_experts(model)
    return model


def measure(model: PreTrainedModel, num_prompts: int, num_generations: int, max_seq_len: int, *, graphs: bool) -> float:
    """Tokens per second of one call, the prompts included in its time."""
    chance = torch.Generator().manual_seed(1)
    shortest, longest = _PROMPT_TOKENS
    lengths = torch.randint(shortest, longest + 1, (num_prompts,), generator=chance).tolist()
    prompts = [torch.randint(3, model.config.vocab_size, (n,), generator=chance).tolist() for n in lengths]
    sampling = Sampling(max_new_tokens=max_seq_len, stop_ids=())
    start = time.perf_counter()
    drawn = generate(model, prompts, sampling, num_samples=num_generations, seed=(1,), cuda_graphs=graphs)
    return sum(map(len, drawn.ids)) / (time.perf_counter() - start)  # `generate` has waited for the last token
