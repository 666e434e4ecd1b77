"""Forward and backward of one block of experts with LoRA: ours, and what a user would take instead, in one run.

Legend: T tokens, K top-k, E experts, H hidden, I expert intermediate.

Counted work is 12·T·K·H·I operations: the frozen products, forward and for the gradient of their input. Steps are
enqueued one after the other and timed by events, as they are in training; the median is told. Memory is the peak above
what is there before a step: weights, adapter and inputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from coati_ext.benchmark.timing import device_name, dtype_of, matmul_tflops, measure
from coati_ext.kernel.fp8_cast import quantize_fp8
from coati_ext.moe.experts import PROJECTIONS, MoeExperts


@dataclass(frozen=True, kw_only=True)
class Shape:
    num_experts: int
    hidden: int
    intermediate: int
    top_k: int


SHAPES = {
    "deepseek_v3": Shape(num_experts=256, hidden=7168, intermediate=2048, top_k=8),
    "qwen3_30b_a3b": Shape(num_experts=128, hidden=2048, intermediate=768, top_k=8),
    "mixtral_8x7b": Shape(num_experts=8, hidden=4096, intermediate=14336, top_k=2),
    "deepseek_v2_lite": Shape(num_experts=64, hidden=2048, intermediate=1408, top_k=6),
}
ROUTINGS = ("balanced", "uniform", "skewed", "single")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One engine on one shape, number of tokens and routing."""

    shape: str
    num_tokens: int
    routing: str
    engine: str
    ms: float
    tflops: float
    of_ceiling: float
    """Its share of the rate of a large matrix product in this run."""
    peak_gb: float


def compare(
    shapes: dict[str, Shape],
    tokens: Sequence[int],
    routings: Sequence[str],
    engines: Sequence[str],
    *,
    rank: int = 8,
    steps: int = 7,
    show: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure, and show each row when it is there; engines share their inputs.

    Returns:
        {"ceiling_tflops", "rows": of `Row`, "failed": engine, shape and error of what could not run}, as JSON.

    Raises:
        ValueError: an unknown engine or routing.
    """
    for name, given, known in (("engines", engines, ENGINES), ("routings", routings, ROUTINGS)):
        if unknown := set(given) - set(known):
            raise ValueError(f"--{name}: unknown {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ceiling = matmul_tflops(device)
    where = f"{device_name(device)}, {dtype_of(device)}"
    show(f"{where}, LoRA rank {rank} on gate, up and down; matmul {ceiling:.0f} TFLOP/s")
    show(
        f"{'shape':<18}{'tokens':>7} {'routing':<9}{'engine':<13}{'ms':>9}{'TFLOP/s':>9}{'of matmul':>10}{'peak GB':>9}"
    )
    report: dict[str, Any] = {"ceiling_tflops": ceiling, "rows": [], "failed": []}
    for name, shape in shapes.items():
        for engine in engines:
            try:
                block = ENGINES[engine](shape, rank, device)
                for num_tokens in tokens:
                    for routing in routings:
                        ms, peak = _measure(block, shape, num_tokens, routing, device, steps)
                        work = 12e-9 * num_tokens * shape.top_k * shape.hidden * shape.intermediate
                        row = Row(
                            shape=name, num_tokens=num_tokens, routing=routing, engine=engine, ms=ms,
                            tflops=work / ms, of_ceiling=work / ms / ceiling, peak_gb=peak / 1e9,
                        )  # fmt: skip
                        show(_line(row))
                        report["rows"].append(asdict(row))
            except torch.OutOfMemoryError as error:
                report["failed"].append({"engine": engine, "shape": name, "error": str(error).partition(".")[0]})
                show(f"{name:<18}{engine}: out of memory")
            block = None
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return report


def _line(row: Row) -> str:
    return (
        f"{row.shape:<18}{row.num_tokens:>7} {row.routing:<9}{row.engine:<13}{row.ms:>9.2f}{row.tflops:>9.0f}"
        f"{row.of_ceiling:>10.0%}{row.peak_gb:>9.2f}"
    )


# --- the engines: a module called as transformers calls its experts


def _ours(shape: Shape, rank: int, device: torch.device) -> nn.Module:
    block = MoeExperts(_frozen(shape, rank, device))
    block.add_lora(list(PROJECTIONS), rank=rank, scaling=2.0)
    for factors in (block.lora_A, block.lora_B):
        for parameter in factors.values():
            nn.init.normal_(parameter, std=0.02)
    return block


def _ours_fp8(shape: Shape, rank: int, device: torch.device) -> nn.Module:
    """Weights that `--frozen_dtype fp8` keeps."""
    block = _ours(shape, rank, device)
    for name, num_parts in (("gate_up_proj", 2), ("down_proj", 1)):
        values, scales = quantize_fp8(getattr(block, name).data.unflatten(1, (num_parts, -1)))
        block.keep_fp8(name)
        getattr(block, name).data = values.flatten(1, 2)
        getattr(block, f"{name}_scale_inv").data = scales.flatten(1, 2)
    return block


def _ours_fp8_compute(shape: Shape, rank: int, device: torch.device) -> nn.Module:
    """With `--fp8_compute` as well."""
    block = _ours_fp8(shape, rank, device)
    block.fp8_compute = True
    return block


def _frozen(shape: Shape, rank: int, device: torch.device, implementation: str = "grouped_mm") -> nn.Module:
    """transformers' experts, without LoRA."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        num_experts=shape.num_experts, hidden_size=shape.hidden, moe_intermediate_size=shape.intermediate
    )
    config._experts_implementation = implementation
    with torch.device("meta"):
        experts = Qwen3MoeExperts(config).to(dtype_of(device))
    experts.to_empty(device=device).requires_grad_(False)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.02)
    return experts


def _peft(shape: Shape, rank: int, device: torch.device, implementation: str = "grouped_mm") -> nn.Module:
    """PEFT's `target_parameters`, with the rank of gate and up together where they are one parameter."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        rank_pattern={r".*gate_up_proj": 2 * rank},
        init_lora_weights=False,
    )  # fmt: skip
    holder = nn.Module()
    holder.experts = _frozen(shape, rank, device, implementation)
    return inject_adapter_in_model(config, holder).experts


def _peft_eager(shape: Shape, rank: int, device: torch.device) -> nn.Module:
    return _peft(shape, rank, device, "eager")


class _Loop(nn.Module):
    """One small MLP an expert, PEFT's LoRA on its linears, and a loop over those that have tokens, as ColossalAI's
    modelling code for DeepSeek has it."""

    def __init__(self, shape: Shape, rank: int, device: torch.device) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        super().__init__()
        with torch.device(device):
            self.experts = nn.ModuleList(_Expert(shape, dtype_of(device)) for _ in range(shape.num_experts))
        self.experts.requires_grad_(False)
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(PROJECTIONS), init_lora_weights=False)
        inject_adapter_in_model(config, self)

    def forward(self, hidden_TH: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden_TH)
        order = index_TK.view(-1).argsort()
        counts = torch.bincount(index_TK.view(-1), minlength=len(self.experts)).tolist()
        token = order // index_TK.shape[1]
        rows = hidden_TH[token].split(counts)
        done = torch.cat([expert(x) for expert, x in zip(self.experts, rows, strict=True) if len(x)])
        return out.index_add(0, token, (done * weights_TK.view(-1)[order].unsqueeze(1)).to(out.dtype))


class _Expert(nn.Module):
    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (
            nn.Linear(shape.hidden, shape.intermediate, bias=False, dtype=dtype) for _ in range(2)
        )
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


ENGINES: dict[str, Callable[[Shape, int, torch.device], nn.Module]] = {
    "ours": _ours,
    "ours_fp8": _ours_fp8,
    "ours_fp8_compute": _ours_fp8_compute,
    "frozen": _frozen,
    "peft": _peft,
    "peft_eager": _peft_eager,
    "loop": _Loop,
}


# --- the measurement


def _measure(
    block: nn.Module, shape: Shape, num_tokens: int, routing: str, device: torch.device, steps: int
) -> tuple[float, int]:
    """Median milliseconds, and the peak in bytes (0 on a CPU)."""
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, shape.hidden, device=device, dtype=dtype_of(device)).requires_grad_()
    weights = torch.rand(num_tokens, shape.top_k, device=device).requires_grad_()
    index, probe = route(shape, num_tokens, routing, device), torch.randn_like(hidden)
    leaves = [hidden, weights, *(p for p in block.parameters() if p.requires_grad)]

    def step() -> None:
        torch.autograd.grad(block(hidden, index, weights), leaves, probe, allow_unused=True)

    return measure(step, device, steps)


def route(shape: Shape, num_tokens: int, routing: str, device: torch.device) -> torch.Tensor:
    """(T, K) experts of each token, all different but for `single`, where one expert has every row.

    balanced: equally many rows for each expert. uniform: each token draws. skewed: the draw favours some, by
    Zipf's law.
    """
    e, k = shape.num_experts, shape.top_k
    if routing == "single":
        return torch.zeros(num_tokens, k, dtype=torch.int64, device=device)
    if routing == "balanced":
        return (torch.arange(num_tokens * k, device=device) % e).view(num_tokens, k)[torch.randperm(num_tokens)]
    score = torch.zeros(e, device=device)
    if routing == "skewed":
        score = -torch.log(torch.arange(1, e + 1, device=device).float())
    noise = -torch.log(-torch.log(torch.rand(num_tokens, e, device=device)))
    return (score + noise).topk(k, dim=-1).indices
