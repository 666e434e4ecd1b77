"""One rank's share of a layout, trained on one GPU: whether it fits, and how long it computes.

The process takes itself for that rank (`one_of_many.py`) and goes through the code of a real run: the plugin's
sharding, LoRA, ZeRO, the pipeline's schedule and the trainer's steps. The share has its true widths, experts and layers
with random weights; routers are overruled, so that the rows that come and go are those of the routing asked for. Only
communication is not there: rows and counts are copied in place, and messages of other stages are noise.

Legend: T tokens, K top-k, E experts of the model.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coati_ext.benchmark.experts import ROUTINGS, Shape, route
from coati_ext.benchmark.one_of_many import as_rank
from coati_ext.benchmark.process import own_peaks

STEPS, WARMUP = 3, 1


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What is rehearsed.

    Raises:
        ValueError: a number out of range, or numbers that do not go together; names the flags.
    """

    model: dict[str, Any]
    """Values of a config.json."""
    world_size: int
    ep: int = 1
    pp: int = 1
    rank: int = 0
    frozen_dtype: str | None = None
    lora_rank: int = 8
    lora_targets: tuple[str, ...] = ("mlp",)
    batch_size: int = 1
    """Rows of a data-parallel rank in a step."""
    microbatch_size: int = 1
    max_length: int = 4096
    use_grad_checkpoint: bool = False
    torch_compile: bool = False
    fp8_compute: bool = False
    gpu_gb: float | None = None
    """GiB that torch may take of the GPU, as on a smaller one."""
    routing: str = "balanced"
    """One of `ROUTINGS`, or a file: rows of each expert as a JSON list, or a list of these for each MoE layer."""

    def __post_init__(self) -> None:
        for name in ("world_size", "ep", "pp", "lora_rank", "batch_size", "microbatch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if self.max_length < 2:
            raise ValueError(f"--max_length must be at least 2, got {self.max_length}")
        if self.world_size % (self.ep * self.pp):
            raise ValueError(f"--ep {self.ep} x --pp {self.pp} does not divide --world_size {self.world_size}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"--rank must be from 0 to {self.world_size - 1}, got {self.rank}")
        if self.frozen_dtype not in (None, "fp8"):
            raise ValueError(f"--frozen_dtype must be fp8, got {self.frozen_dtype}")
        if self.fp8_compute and self.frozen_dtype is None:
            raise ValueError("--fp8_compute needs --frozen_dtype fp8")
        if self.gpu_gb is not None and not self.gpu_gb > 0:
            raise ValueError(f"--gpu_gb must be above 0, got {self.gpu_gb}")

    @property
    def num_tokens(self) -> int:
        """Of a data-parallel rank in a step."""
        return self.batch_size * self.max_length


@dataclass(kw_only=True)
class Times:
    """Seconds of what was done, by what it was: "forward" and "backward" of "MoE" and "dense" layers, "step"."""

    marks: list[tuple[str, Any]] = field(default_factory=list)

    def mark(self, name: str) -> None:
        if not torch.cuda.is_available():
            self.marks.append((name, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append((name, event))

    def spans(self) -> dict[str, list[float]]:
        """Milliseconds from each mark to the next."""
        found: dict[str, list[float]] = {}
        for (name, start), (_, end) in zip(self.marks, self.marks[1:], strict=False):
            ms = start.elapsed_time(end) if torch.cuda.is_available() else 1e3 * (end - start)
            found.setdefault(name, []).append(ms)
        return found


def rehearse(layout: Layout) -> dict[str, Any]:
    """Train a few steps of the rank's share.

    Returns:
        The report, as JSON: see `table`.

    Raises:
        ValueError: the model or the layout is not supported, or the routing does not fit the model.
        torch.OutOfMemoryError: the share does not fit.
    """
    from coati_ext import compat

    compat.apply()
    with as_rank(layout.rank, layout.world_size) as traffic, tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(layout.model))
        torch.manual_seed(0)
        return _rehearse(layout, folder, traffic)


def _rehearse(layout: Layout, folder: str, traffic: Any) -> dict[str, Any]:
    from colossalai.booster import Booster
    from peft import LoraConfig

    from coati_ext.models.compiled import compile_layers
    from coati_ext.models.recompute import enable_recompute
    from coati_ext.plugin import MoeLoraPlugin
    from coati_ext.trainer.sft import SFTTrainer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = "bf16" if device.type == "cuda" else "fp32"
    if layout.gpu_gb is not None and device.type == "cuda":
        has = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, layout.gpu_gb * 2**30 / has))
    plugin = MoeLoraPlugin(ep_size=layout.ep, pp_size=layout.pp, precision=precision, max_norm=1.0)
    booster, sizes = Booster(plugin=plugin), {}
    model = _share(layout, plugin, folder, device)
    sizes["frozen weights"] = _nbytes(model.parameters())
    by_dtype = _bytes_by_dtype(model)
    if layout.use_grad_checkpoint:
        enable_recompute(model)
    lora = LoraConfig(r=layout.lora_rank, lora_alpha=2 * layout.lora_rank, target_modules=list(layout.lora_targets))
    booster.enable_lora(model, lora_config=lora)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sizes["adapter"] = _nbytes(trained)
    if layout.torch_compile:
        compile_layers(model)
    _overrule_routers(model, layout, device)
    times = Times()
    _mark_layers(model, times)
    inner = torch.optim.AdamW(trained, lr=1e-4, fused=device.type == "cuda")
    schedule = torch.optim.lr_scheduler.ConstantLR(inner, factor=1.0)
    boosted, optimizer, *_ = booster.boost(model, inner, lr_scheduler=schedule)
    boosted.train()
    trainer = SFTTrainer(
        booster=booster, model=boosted, optimizer=optimizer, lr_scheduler=schedule, dataloader=[],
        dp_group=plugin.mixed_dp_group, pp_group=plugin.pp_group if layout.pp > 1 else None,
        microbatch_size=layout.microbatch_size,
    )  # fmt: skip
    upstream_step = optimizer.step

    def marked_step(*args: Any, **kwargs: Any) -> Any:
        times.mark("optimizer")
        return upstream_step(*args, **kwargs)

    optimizer.step = marked_step
    batch = _batch(layout)
    seconds = []
    for number in range(WARMUP + STEPS):
        if number == WARMUP:
            times.marks.clear()
            traffic.all_to_all_bytes = traffic.stage_bytes = 0
        start = time.perf_counter()
        trainer.train_step([batch])
        times.mark("between")
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    states = {id(value): value for state in inner.state.values() for value in state.values() if torch.is_tensor(value)}
    masters = {id(p): p for group in inner.param_groups for p in group["params"]}
    kept = {id(p) for p in trained}
    sizes["optimizer states and fp32 adapter"] = _nbytes(
        [*states.values(), *(p for key, p in masters.items() if key not in kept)]
    )
    peaks = own_peaks()
    spans = {name: statistics.median(ms) for name, ms in times.spans().items()}
    step = statistics.median(seconds[WARMUP:])
    num_microbatches = -(-layout.batch_size // layout.microbatch_size) if layout.pp > 1 else 1
    return {
        "layout": {**asdict(layout), "lora_targets": list(layout.lora_targets)},
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "stage": plugin.layout.coordinates(plugin.layout_rank).pp,
        "layers": _layers(model),
        "bytes": sizes,
        "weight_bytes_by_dtype": by_dtype,
        "peak_bytes": peaks.device_allocated or peaks.host,
        "peak_reserved_bytes": peaks.device_reserved,
        "ms": spans,
        "step_ms": 1e3 * step,
        "tokens_per_s_per_gpu": layout.num_tokens / step / layout.pp,
        "num_microbatches": num_microbatches,
        "bubble": (num_microbatches + layout.pp - 1) / num_microbatches,
        "all_to_all_bytes_per_step": traffic.all_to_all_bytes // STEPS,
        "stage_bytes_per_step": traffic.stage_bytes // STEPS,
    }


def table(report: dict[str, Any]) -> str:
    """The report in lines, each with how its numbers were found."""
    layout, ms, sizes = report["layout"], report["ms"], report["bytes"]
    layers = ", ".join(f"{count} {kind}" for kind, count in report["layers"].items())
    kinds = ", ".join(f"{dtype} {nbytes / 1e9:.1f}" for dtype, nbytes in report["weight_bytes_by_dtype"].items())
    lines = [
        f"rank {layout['rank']} of {layout['world_size']}, ep {layout['ep']}, pp {layout['pp']} (stage "
        f"{report['stage']}): {layers} layers; "
        f"{layout['batch_size']} x {layout['max_length']} tokens a step, {layout['routing']} routing",
        f"{'frozen weights, GB':<40}{sizes['frozen weights'] / 1e9:>12.2f}  measured ({kinds})",
        f"{'adapter, GB':<40}{sizes['adapter'] / 1e9:>12.2f}  measured",
    ]
    name = "optimizer states and fp32 adapter"
    lines.append(f"{name + ', GB':<40}{sizes[name] / 1e9:>12.2f}  measured")
    lines.append(f"{'peak memory, GB':<40}{report['peak_bytes'] / 1e9:>12.2f}  measured")
    if report["peak_reserved_bytes"]:
        lines.append(f"{'peak reserved by torch, GB':<40}{report['peak_reserved_bytes'] / 1e9:>12.2f}  measured")
    for key, label in _SPANS.items():
        if key in ms:
            lines.append(f"{label:<40}{ms[key]:>12.2f}  measured")
    lines.append(f"{'whole step, ms':<40}{report['step_ms']:>12.1f}  measured, without communication")
    rate = report["tokens_per_s_per_gpu"]
    lines.append(f"{'tokens/s/GPU':<40}{rate:>12,.0f}  measured, without communication")
    if layout["pp"] > 1:
        bubble = f"x {report['num_microbatches']} / ({report['num_microbatches']} + {layout['pp']} - 1) micro-batches"
        lines.append(f"{'tokens/s/GPU with the bubble':<40}{rate / report['bubble']:>12,.0f}  estimated: {bubble}")
    for key, label in (("all_to_all_bytes_per_step", "experts' exchange"), ("stage_bytes_per_step", "to stages")):
        if report[key]:
            lines.append(f"{label + ', GB a step sent':<40}{report[key] / 1e9:>12.2f}  counted, not sent")
    return "\n".join(lines)


_SPANS = {
    "forward MoE": "forward of a MoE layer, ms",
    "forward dense": "forward of a dense layer, ms",
    "backward MoE": "recompute + backward of a MoE layer, ms",
    "backward dense": "recompute + backward of a dense layer, ms",
    "optimizer": "optimizer step, ms",
}


# --- the share


def _share(layout: Layout, plugin: Any, folder: str, device: torch.device) -> nn.Module:
    """The rank's part of the model on the device, frozen, with random weights."""
    from coati_ext.checkpoint_io.keep_fp8 import keep_weights_fp8
    from coati_ext.checkpoint_io.load import allocate, build_meta_model

    model = build_meta_model(folder, plugin.dtype)
    plugin.shard(model)
    if layout.frozen_dtype == "fp8":
        keep_weights_fp8(model, _published_in_fp8(model), fp8_compute=layout.fp8_compute)
    allocate(model, device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _fill(name, parameter)
    return model.requires_grad_(False)


def _published_in_fp8(model: nn.Module) -> list[str]:
    """As DeepSeek publishes it: experts and all linear layers of the decoder layers but routers."""
    from coati_ext.models.targets import structure_of
    from coati_ext.moe.experts import MoeExperts

    routers, names = set(structure_of(model).routers), []
    for path, module in model.named_modules():
        if isinstance(module, MoeExperts):
            names += [f"{path}.gate_up_proj", f"{path}.down_proj"]
        elif type(module) is nn.Linear and any(part.isdigit() for part in path.split(".")) and path not in routers:
            names.append(f"{path}.weight")
    return names


def _fill(name: str, parameter: nn.Parameter) -> None:
    if parameter.dtype == torch.float8_e4m3fn:
        for part in parameter.data.view(torch.int8).view(-1, *parameter.shape[-2:]):  # a matrix at a time
            part.random_(-127, 127)
            part.masked_fill_(part == -1, 0)  # which is no number, nor is 127
    elif name.endswith("_scale_inv"):
        parameter.fill_(1e-4)
    elif parameter.dim() == 1:
        parameter.fill_(1.0)
    else:
        parameter.normal_(std=0.02)


def _overrule_routers(model: nn.Module, layout: Layout, device: torch.device) -> None:
    """Each MoE layer's tokens go where the routing says, in the forward and in its recomputation."""
    from coati_ext.moe.experts import MoeExperts

    experts = [module for module in model.modules() if isinstance(module, MoeExperts)]
    for number, module in enumerate(experts):
        made: dict[tuple[int, int], torch.Tensor] = {}

        def choose(module: nn.Module, args: tuple, number: int = number, made: dict = made) -> tuple:
            hidden, index_TK, weights = args
            key = tuple(index_TK.shape)
            if key not in made:
                made[key] = _routes(layout.routing, number, *key, module.num_experts, device)
            return hidden, made[key], weights

        module.register_forward_pre_hook(choose)


def _routes(
    routing: str, layer: int, num_tokens: int, top_k: int, num_experts: int, device: torch.device
) -> torch.Tensor:
    """(T, K) experts of each token."""
    if routing in ROUTINGS:
        shape = Shape(num_experts=num_experts, hidden=1, intermediate=1, top_k=top_k)
        return route(shape, num_tokens, routing, device)
    try:
        counts = json.loads(Path(routing).read_text(encoding="utf-8"))
        counts = counts[layer] if isinstance(counts[0], list) else counts
        weights_E = torch.tensor(counts, dtype=torch.float64, device=device)
    except (OSError, ValueError, TypeError, LookupError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"--routing {routing}: neither {', '.join(ROUTINGS)} nor rows of each expert: {reason}"
        ) from None
    if weights_E.shape != (num_experts,) or (weights_E > 0).sum() < top_k or (weights_E < 0).any():
        raise ValueError(f"--routing {routing}: expected {num_experts} counts, {top_k} of them above 0, for each layer")
    noise = -torch.log(-torch.log(torch.rand(num_tokens, num_experts, device=device, dtype=torch.float64)))
    return (weights_E.log() + noise).topk(top_k, dim=-1).indices


def _batch(layout: Layout) -> dict[str, torch.Tensor]:
    shape = (layout.batch_size, layout.max_length)
    ids = torch.randint(layout.model["vocab_size"], shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


# --- measuring


def _mark_layers(model: nn.Module, times: Times) -> None:
    """A mark where a layer begins and ends; what follows the beginning of a recomputation is its backward too."""
    for layer in _own_layers(model):
        kind = _kind(layer)

        def before(*_: Any, kind: str = kind) -> None:
            times.mark(f"backward {kind}" if torch._C._current_graph_task_id() != -1 else f"forward {kind}")

        def after(*_: Any) -> None:
            if torch._C._current_graph_task_id() == -1:
                times.mark("between")

        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)


def _own_layers(model: nn.Module) -> Iterator[nn.Module]:
    from coati_ext.models.shard import PassThrough

    return (layer for layer in model.base_model.layers if not isinstance(layer, PassThrough))


def _layers(model: nn.Module) -> dict[str, int]:
    kinds = [_kind(layer) for layer in _own_layers(model)]
    return {kind: kinds.count(kind) for kind in ("dense", "MoE") if kind in kinds}


def _kind(layer: nn.Module) -> str:
    from coati_ext.moe.experts import MoeExperts

    return "MoE" if any(isinstance(module, MoeExperts) for module in layer.modules()) else "dense"


def _nbytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _bytes_by_dtype(model: nn.Module) -> dict[str, int]:
    found: dict[str, int] = {}
    for parameter in model.parameters():
        dtype = str(parameter.dtype).removeprefix("torch.")
        found[dtype] = found.get(dtype, 0) + parameter.nbytes
    return found
