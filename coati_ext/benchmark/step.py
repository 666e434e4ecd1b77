"""Whole training steps of a mixture of experts that fits one GPU, true in its shapes and with random weights: ours, and
PEFT on transformers, each in a process of its own.

Same are the config, the tokens, the rows of a step, LoRA's rank on attention and on every expert, bf16 (fp32 on a CPU),
gradient checkpointing, clipping and the fused AdamW. PEFT's adapter is `target_modules` for attention and
`target_parameters` for the experts, on transformers' grouped_mm, in the dtype of the weights: in fp32, its default, it
is slower and larger. Memory is the peak above the frozen weights. The compiled engines have the same modules of their
layers compiled (`compile_layers`).
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coati_ext.benchmark.process import in_own_process, own_peaks

ENGINES = ("ours", "ours_compiled", "peft", "peft_compiled")
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LR, MAX_NORM = 1e-4, 1.0


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every engine does.

    Raises:
        ValueError: a number out of range; names the flag.
    """

    model: dict[str, Any]
    """Values of a config.json."""
    batch_size: int = 4
    max_length: int = 2048
    """Tokens of each row: none is padded."""
    lora_rank: int = 8
    steps: int = 5
    warmup: int = 2

    def __post_init__(self) -> None:
        for name in ("batch_size", "lora_rank", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if self.max_length < 2:
            raise ValueError(f"--max_length must be at least 2, got {self.max_length}")

    @property
    def num_tokens(self) -> int:
        return self.batch_size * self.max_length


def compare(work: Work, engines: Sequence[str], *, show: Callable[[str], None] = print) -> dict[str, Any]:
    """
    Returns:
        {"work", "engines": results by name, "ratios": ours (compiled if it ran) / each other,
        "failed": reasons by name}, as JSON.

    Raises:
        ValueError: an unknown engine.
    """
    if unknown := set(engines) - set(ENGINES):
        raise ValueError(f"--engines: unknown {', '.join(sorted(unknown))}; there are {', '.join(ENGINES)}")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} thread(s)"
    show(
        f"{device}, {work.batch_size} x {work.max_length} tokens a step, LoRA rank {work.lora_rank} on attention and "
        f"experts; medians of {work.steps} steps after {work.warmup}"
    )
    show(f"{'engine':<15}{'ms/step':>10}{'tokens/s':>11}{'weights GB':>12}{'peak GB above':>15}{'loss':>9}")
    results: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for name in engines:
        try:
            results[name] = found = in_own_process(_run, name, work)
        except Exception as error:  # whatever an engine of others raises; the caller sees it in the report
            failed[name] = " ".join(f"{type(error).__name__}: {error}".split())
            show(f"{name:<15}failed: {failed[name][:200]}")
            continue
        show(
            f"{name:<15}{found['ms']:>10.1f}{found['tokens_per_s']:>11,.0f}{found['weight_bytes'] / 1e9:>12.2f}"
            f"{found['peak_bytes_above'] / 1e9:>15.2f}{found['loss']:>9.4f}"
        )
    ratios = {}
    best = "ours_compiled" if "ours_compiled" in results else "ours"
    if ours := results.get(best):
        keys = ("tokens_per_s", "peak_bytes_above")
        ratios = {name: {key: ours[key] / results[name][key] for key in keys} for name in results if name != best}
    for name, of in ratios.items():
        show(
            f"{best} / {name}: {of['tokens_per_s']:.2f} of the tokens/s, {of['peak_bytes_above']:.2f} of the peak above"
        )
    return {"work": asdict(work), "device": device, "engines": results, "ratios": ratios, "failed": failed}


def _run(name: str, work: Work) -> dict[str, Any]:
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(work.model))
        engine, _, compiled = name.partition("_")
        return {"ours": _ours, "peft": _peft}[engine](work, folder, bool(compiled))


def _ours(work: Work, folder: str, compiled: bool) -> dict[str, Any]:
    from coati_ext import compat

    compat.apply()
    import torch.distributed as dist
    from colossalai.booster import Booster
    from peft import LoraConfig

    from coati_ext.models.compiled import compile_layers
    from coati_ext.models.recompute import enable_recompute
    from coati_ext.plugin import MoeLoraPlugin
    from coati_ext.trainer.sft import SFTTrainer
    from coati_ext.utils.launch import launch

    launch(seed=0)
    device = _device()
    plugin = MoeLoraPlugin(precision="bf16" if device.type == "cuda" else "fp32", max_norm=MAX_NORM)
    booster = Booster(plugin=plugin)
    model = _random_model(folder, device)
    weight_bytes = _weight_bytes(model)
    plugin.shard(model)
    enable_recompute(model)
    lora = LoraConfig(r=work.lora_rank, lora_alpha=2 * work.lora_rank, target_modules=["attention", "experts"])
    booster.enable_lora(model, lora_config=lora)
    if compiled:
        compile_layers(model)
    optimizer = _adamw(model, device)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    boosted, optimizer, *_ = booster.boost(model, optimizer, lr_scheduler=schedule)
    boosted.train()
    trainer = SFTTrainer(
        booster=booster, model=boosted, optimizer=optimizer, lr_scheduler=schedule, dataloader=[],
        dp_group=plugin.mixed_dp_group,
    )  # fmt: skip
    batch = _batch(work, device)
    found = _measure(work, model, lambda: trainer.train_step([batch]).loss, weight_bytes, device)
    dist.destroy_process_group()
    return found


def _peft(work: Work, folder: str, compiled: bool) -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model

    from coati_ext.models.compiled import compile_layers

    device = _device()
    model = _random_model(folder, device)
    weight_bytes = _weight_bytes(model)
    config = LoraConfig(
        r=work.lora_rank, lora_alpha=2 * work.lora_rank, target_modules=ATTENTION,
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        rank_pattern={r".*gate_up_proj": 2 * work.lora_rank},
    )  # fmt: skip
    model = get_peft_model(model, config, autocast_adapter_dtype=False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if compiled:
        compile_layers(model.get_base_model())
    model.train()
    optimizer, batch = _adamw(model, device), _batch(work, device)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], MAX_NORM)
        optimizer.step()
        return loss.item()

    return _measure(work, model, step, weight_bytes, device)


def _random_model(folder: str, device: torch.device) -> nn.Module:
    """The model of the config on the device; norms are ones, all else is drawn. Frozen."""
    from coati_ext.checkpoint_io.load import allocate, build_meta_model

    model = build_meta_model(folder, torch.bfloat16 if device.type == "cuda" else torch.float32)
    model.set_experts_implementation("grouped_mm")
    allocate(model, device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=0.02, generator=generator)
    return model.requires_grad_(False)


def _weight_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def _adamw(model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=LR, fused=device.type == "cuda")


def _batch(work: Work, device: torch.device) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(work.model["vocab_size"], (work.batch_size, work.max_length), generator=generator).to(device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def _measure(
    work: Work, model: nn.Module, step: Callable[[], float], weight_bytes: int, device: torch.device
) -> dict[str, Any]:
    num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    seconds, losses = [], []
    for number in range(work.warmup + work.steps):
        if number == work.warmup and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        losses.append(step())  # which waits for the loss
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[work.warmup :])
    peaks = own_peaks()
    peak = peaks.device_allocated or peaks.host
    return {
        "ms": 1e3 * median,
        "tokens_per_s": work.num_tokens / median,
        "weight_bytes": weight_bytes,
        "peak_bytes_above": peak - weight_bytes,
        "num_trained_parameters": num_trained,
        "loss": losses[0],
        "seconds": seconds,
        "losses": losses,
    }


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
