"""Prove that stock PEFT computes with an adapter what we trained: every tensor applied, and the same logits.

Two independent checks. Weights: for every pair in the file, the change that PEFT's layer really makes to the base
weight must equal scaling·B·A from the file; this finds dropped, misplaced and mis-scaled tensors, also of experts that
no probe token visits. Logits: our layers against PEFT's on a probe batch, with PEFT's run sent to the experts that ours
chose, for near a tie rounding alone would send a token elsewhere.

One base model is in memory at a time, and one layer's change; a base must fit the device.
"""

import gc
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from coati_ext.checkpoint_io.adapter import load_adapter, lora_config_from_adapter
from coati_ext.checkpoint_io.adapter_config import padding_targets, read_config, read_shapes
from coati_ext.checkpoint_io.layout import Layout
from coati_ext.checkpoint_io.load import build_meta_model, load_weights
from coati_ext.checkpoint_io.names import LoraTensor, from_disk, to_disk
from coati_ext.models.lora import ADAPTER_NAME, adapters_disabled, inject_lora
from coati_ext.moe.experts import MoeExperts
from coati_ext.utils.adapter_files import adapter_file
from coati_ext.utils.peft_warnings import ignore_pattern_warnings

# Allowed difference of logits, as a share of the largest logit: x·A·B and x·(W+ΔW) differ by the dtype's rounding.
LOGIT_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 2e-2}
# The same for a weight's change against its own largest element: PEFT computes it in the base's dtype.
DELTA_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
_PROBE_LENGTHS = (1, 5, 17, 33)
_LISTED = 2  # names shown per reason

Place = tuple[str, int | None, str | None]  # module path, and of routed experts the expert and its projection
Pairs = dict[Place, dict[str, str]]  # {"lora_A": key in the file, "lora_B": key}
Routing = dict[str, list[tuple[torch.Tensor, torch.Tensor]]]  # experts module -> (top_k_index, top_k_weights) per probe


@dataclass(kw_only=True)
class VerifyReport:
    """What was found. Tensor names are the file's keys; `problems` are reasons beyond the lists, one line each."""

    adapter: str
    pretrained: str
    tensors_in_file: int = 0
    tensors_applied: int = 0
    tensors_missing: list[str] = field(default_factory=list)
    """In the file, and PEFT has no place for them: dropped."""
    tensors_unexpected: list[str] = field(default_factory=list)
    """PEFT has a place for them, and the file has none."""
    tensors_mismatched: list[str] = field(default_factory=list)
    """Taken, but the weight's change is not scaling·B·A."""
    num_untrained_pairs: int = 0
    """lora_B is all zero: e.g. an expert that never got a token. No failure."""
    num_padding_pairs: int = 0
    """Zeros in A and B, written for experts with gate and up alone. No failure."""
    max_logit_diff: float | None = None
    """Largest |ours - PEFT's|; None if one of the two did not load."""
    tolerance: float | None = None
    adapter_effect: float | None = None
    """Largest |logits with the adapter - logits without|."""
    problems: list[str] = field(default_factory=list)

    @property
    def reasons(self) -> list[str]:
        """Why it fails, one line each; empty if it passes."""
        lists = {
            "dropped by PEFT without a word (not targeted by this adapter_config.json)": self.tensors_missing,
            "expected by PEFT, not in the file": self.tensors_unexpected,
            "applied with another value or scale than the file says": self.tensors_mismatched,
        }
        found = [f"{len(names)} tensor(s) {what}: {_first(names)}" for what, names in lists.items() if names]
        found += self.problems
        all_zero = 2 * (self.num_untrained_pairs + self.num_padding_pairs) == self.tensors_in_file
        if self.adapter_effect == 0 or (self.adapter_effect is not None and all_zero):  # but for the order of sums
            found.append("the adapter has no effect on the logits: was it saved before the first step?")
        if self.max_logit_diff is not None and not self.max_logit_diff <= self.tolerance:
            found.append(f"logits differ by {self.max_logit_diff:.3g}, more than {self.tolerance:.3g}")
        return found

    @property
    def passed(self) -> bool:
        return not self.reasons and self.max_logit_diff is not None

    def format(self) -> str:
        """A few lines that end in PASS, or in FAIL with the reasons."""
        lines = [
            f"adapter   {self.adapter}",
            f"base      {self.pretrained}",
            f"tensors   {self.tensors_in_file} in the file, {self.tensors_applied} applied by PEFT, "
            f"{len(self.tensors_missing)} missing, {len(self.tensors_unexpected)} unexpected, "
            f"{len(self.tensors_mismatched)} mismatched",
        ]
        if self.num_untrained_pairs:
            lines.append(f"untrained {self.num_untrained_pairs} pair(s) with lora_B = 0, e.g. experts without a token")
        if self.num_padding_pairs:
            lines.append(f"padding   {self.num_padding_pairs} pair(s) of zeros for experts without LoRA on down_proj")
        if self.adapter_effect is not None:
            lines.append(f"effect    the adapter moves logits by up to {self.adapter_effect:.3g}")
        if self.max_logit_diff is not None:
            lines.append(f"logits    ours against PEFT's: {self.max_logit_diff:.3g} (tolerance {self.tolerance:.3g})")
        lines += [f"FAIL      {reason}" for reason in self.reasons] or ["PASS      stock PEFT gives what was trained"]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {"passed": self.passed, "reasons": self.reasons, **asdict(self)}


def verify_adapter(
    pretrained: str | Path,
    adapter: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    token_ids: list[list[int]] | None = None,
    tolerance: float | None = None,
) -> VerifyReport:
    """Load base and adapter with our layers and with stock PEFT, and compare.

    Args:
        token_ids: probe sequences, run one by one without padding; by default random ones of 1 to 33 tokens.
        tolerance: largest logit difference; by default `LOGIT_TOLERANCE` of the largest logit.

    Raises:
        ValueError: a path that is no model or no adapter directory, or an adapter for another architecture. What is
            wrong with the adapter itself is in the report.
    """
    file = adapter_file(adapter)
    if dtype not in LOGIT_TOLERANCE:
        raise ValueError(f"dtype {dtype} cannot be verified; accepted: {[str(t) for t in LOGIT_TOLERANCE]}")
    config = _base_config(pretrained)
    token_ids = token_ids if token_ids is not None else probe_tokens(config)
    report = VerifyReport(adapter=str(adapter), pretrained=str(pretrained))
    pairs = _read_pairs(file, report)

    base = _load_base(pretrained, config, dtype, device)
    _check_modules(base, pairs, report)
    routing: Routing = {}
    ours = _our_logits(base, adapter, token_ids, routing, report)
    del base
    gc.collect()
    base = _load_base(pretrained, config, dtype, device)
    theirs = _peft_logits(base, adapter, pairs, token_ids, routing, report)
    if ours is not None and theirs is not None:
        report.max_logit_diff = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
        largest = max(float(logits.abs().max()) for logits in ours)
        report.tolerance = tolerance if tolerance is not None else LOGIT_TOLERANCE[dtype] * max(1.0, largest)
    return report


def probe_tokens(config: Any, *, seed: int = 0) -> list[list[int]]:
    """Random token ids of several lengths, valid for the vocabulary and the positions of this model config."""
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or max(_PROBE_LENGTHS)
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(text.vocab_size, (min(length, longest),), generator=generator).tolist()
        for length in _PROBE_LENGTHS
    ]


def _base_config(pretrained: str | Path) -> Any:
    if not Path(pretrained).is_dir():
        raise ValueError(f"base model {pretrained} is no directory; expected a local Hugging Face model directory")
    try:
        return AutoConfig.from_pretrained(str(pretrained))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"base model {pretrained}: config.json cannot be read ({_one_line(error)})") from None


def _load_base(pretrained: str | Path, config: Any, dtype: torch.dtype, device: str | torch.device) -> PreTrainedModel:
    """transformers' model; of an FP8 checkpoint with the weights that training saw, dequantised by our loader."""
    if getattr(config, "quantization_config", None) is not None:
        model = build_meta_model(pretrained, dtype)
        load_weights(model, pretrained, Layout(), 0, device=device)
        return model
    config.use_cache = False
    try:
        model = AutoModelForCausalLM.from_pretrained(str(pretrained), config=config, dtype=dtype)
    except (OSError, ValueError) as error:
        raise ValueError(f"base model {pretrained} cannot be loaded: {_one_line(error)}") from None
    return model.to(device).eval()


# --- the file


def _read_pairs(file: Path, report: VerifyReport) -> Pairs:
    """The file's pairs; what is wrong with keys and values is reported."""
    pairs: Pairs = {}
    shapes = read_shapes(file)
    report.tensors_in_file = len(shapes)
    for key in shapes:
        try:
            name = from_disk(key)
        except ValueError as error:
            report.problems.append(str(error))
            continue
        pairs.setdefault((name.path, name.expert, name.projection), {})[name.factor] = key
    for pair in [pair for pair, keys in pairs.items() if len(keys) < 2]:
        (key,) = pairs.pop(pair).values()
        report.problems.append(f"{key} has no partner (lora_A and lora_B come in pairs)")
    with safe_open(file, framework="pt") as opened:
        broken = [key for key in shapes if not torch.isfinite(opened.get_tensor(key)).all()]
    if broken:
        report.problems.append(f"{len(broken)} tensor(s) hold NaN or infinity: {_first(broken)}")
    return pairs


def _check_modules(base: nn.Module, pairs: Pairs, report: VerifyReport) -> None:
    """Raise if most of the adapter's modules are not in this model; report it if some are not."""
    wanted = {path for path, *_ in pairs}
    strangers = sorted(wanted - {path for path, _ in base.named_modules()})
    if 2 * len(strangers) > len(wanted):
        raise ValueError(
            f"adapter {report.adapter} is for another architecture than {report.pretrained} ({type(base).__name__}): "
            f"{len(strangers)} of its {len(wanted)} modules are not there, e.g. {strangers[0]}"
        )
    if strangers:
        report.problems.append(f"{len(strangers)} module(s) are not in the base model: {_first(strangers)}")


# --- ours


@torch.no_grad()
def _our_logits(
    base: PreTrainedModel, adapter: str | Path, token_ids: list[list[int]], routing: Routing, report: VerifyReport
) -> list[torch.Tensor] | None:
    if report.problems:
        return None  # the file's own faults are told already, and our loader would tell of the first again
    try:
        inject_lora(base, lora_config_from_adapter(adapter))
        load_adapter(base, adapter)
    except ValueError as error:
        report.problems.append(f"our loader refuses it: {_one_line(error)}")
        return None
    base.eval()
    with adapters_disabled(base):
        without = _logits(base, token_ids)
    for path, module in base.named_modules():
        if isinstance(module, MoeExperts):
            routing[path] = []
            module.register_forward_pre_hook(_record(routing[path]))
    logits = _logits(base, token_ids)
    report.adapter_effect = max(float((a - b).abs().max()) for a, b in zip(logits, without, strict=True))
    return logits


def _record(chosen: list[tuple[torch.Tensor, torch.Tensor]]) -> Callable:
    def hook(module: nn.Module, args: tuple) -> None:
        chosen.append(args[1:3])

    return hook


def _replay(chosen: list[tuple[torch.Tensor, torch.Tensor]]) -> Callable:
    left = iter(chosen)

    def hook(module: nn.Module, args: tuple) -> tuple:
        return (args[0], *next(left))

    return hook


def _logits(model: nn.Module, token_ids: list[list[int]]) -> list[torch.Tensor]:
    device = next(model.parameters()).device
    return [model(torch.tensor([ids], device=device)).logits.float().cpu() for ids in token_ids]


# --- PEFT's


@torch.no_grad()
def _peft_logits(
    base: PreTrainedModel,
    adapter: str | Path,
    pairs: Pairs,
    token_ids: list[list[int]],
    routing: Routing,
    report: VerifyReport,
) -> list[torch.Tensor] | None:
    model_type = base.config.model_type
    with warnings.catch_warnings():
        ignore_pattern_warnings()
        # Missing and dropped tensors are in the report, by name.
        warnings.filterwarnings("ignore", message="Found missing adapter keys while loading the checkpoint")
        try:
            model = PeftModel.from_pretrained(base, str(adapter)).eval()
        except (ValueError, RuntimeError, KeyError, TypeError, NotImplementedError) as error:
            report.problems.append(f"stock PEFT cannot load it: {_one_line(error)}")
            return None
    _compare_weights(model.get_base_model(), adapter, pairs, model_type, report)
    for path, chosen in routing.items():
        model.get_base_model().get_submodule(path).register_forward_pre_hook(_replay(chosen))
    return _logits(model, token_ids)


def _compare_weights(
    model: nn.Module, adapter: str | Path, pairs: Pairs, model_type: str, report: VerifyReport
) -> None:
    """Fill the tensor lists and counts of the report."""
    file = adapter_file(adapter)
    config = read_config(adapter)
    scaling = config.lora_alpha / (config.r**0.5 if config.use_rslora else config.r)
    padded = padding_targets(file, {keys[f]: from_disk(keys[f]) for keys in pairs.values() for f in keys})
    left = dict(pairs)
    with safe_open(file, framework="pt") as opened:
        for place, delta in _peft_deltas(model):
            keys = left.pop(place, None)
            if keys is None:
                report.tensors_unexpected += _keys(place, model_type)
                continue
            factor_A, factor_B = (opened.get_tensor(keys[factor]).float() for factor in ("lora_A", "lora_B"))
            truth = scaling * (factor_B @ factor_A)
            if not _close(delta.float().cpu(), truth, delta.dtype):
                report.tensors_mismatched += sorted(keys.values())
                continue
            report.tensors_applied += 2
            if from_disk(keys["lora_A"]).target in padded:
                report.num_padding_pairs += 1
            elif not torch.any(factor_B):
                report.num_untrained_pairs += 1
    report.tensors_missing += sorted(key for keys in left.values() for key in keys.values())


def _close(delta: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype) -> bool:
    """Also false for NaN and for other shapes."""
    bound = DELTA_TOLERANCE[dtype] * truth.abs().max()
    return delta.shape == truth.shape and bool((delta - truth).abs().max() <= bound)


def _peft_deltas(model: nn.Module) -> Iterator[tuple[Place, torch.Tensor]]:
    """The change of the weight, (out, in), at every place where PEFT put LoRA; one layer at a time."""
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer) or ADAPTER_NAME not in module.lora_A:
            continue
        path = name.replace(".base_layer", "")
        delta = module.get_delta_weight(ADAPTER_NAME)
        if not isinstance(module, ParamWrapper) or delta.dim() == 2:
            yield (path, None, None), delta
        elif module.parameter_name == "gate_up_proj":
            for expert, gate_up in enumerate(delta):
                gate, up = gate_up.chunk(2)
                yield (path, expert, "gate_proj"), gate
                yield (path, expert, "up_proj"), up
        else:
            for expert, down in enumerate(delta):
                yield (path, expert, module.parameter_name), down


def _keys(place: Place, model_type: str) -> list[str]:
    path, expert, projection = place
    return [
        to_disk(LoraTensor(path=path, expert=expert, projection=projection, factor=factor), model_type)
        for factor in ("lora_A", "lora_B")
    ]


def _first(names: list[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 400 else f"{text[:400]} ..."
