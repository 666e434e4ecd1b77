"""The steps of a fine-tuning command between its flags and its trainer, one function each."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from peft import LoraConfig
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from coati_ext.checkpoint_io.adapter_config import lora_config_from_adapter
from coati_ext.checkpoint_io.load import build_meta_model, load_weights
from coati_ext.config import FinetuneConfig, LoraSettings, flatten_config
from coati_ext.dataset import ConversationCollator, EpochBatchSampler, RawConversationDataset
from coati_ext.dataset.packing import PackedCollator, check_packing_supported
from coati_ext.models.recompute import enable_recompute
from coati_ext.models.targets import resolve_targets, structure_of
from coati_ext.trainer.nonfinite import check_weights
from coati_ext.trainer.sft import SFTTrainer, cosine_with_warmup, num_optimizer_steps
from coati_ext.trainer.state import StateKeeper, drop_later_lines
from coati_ext.utils.device import current_device, peak_memory_gb
from coati_ext.utils.launch import print_rank_0
from coati_ext.utils.metrics import MetricsLogger
from coati_ext.utils.preflight import read_model_config
from coati_ext.utils.sizes import format_bytes

if TYPE_CHECKING:
    from colossalai.booster import Booster
    from colossalai.booster.plugin import MoeHybridParallelPlugin

ADAPTER_DIR, MODEL_DIR = "lora", "model"


def prepare_run(config: FinetuneConfig) -> None:
    """Make the run's directory and save the resolved config in it (rank 0)."""
    if dist.get_rank() == 0:
        save_dir = Path(config.output.save_dir)
        save_dir.mkdir(parents=True, exist_ok=True)
        file = Path(config.output.config_file)
        file = save_dir / file if file.name == str(file) else file
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(flatten_config(config), indent=2) + "\n")


def load_dataset(config: FinetuneConfig, tokenizer: PreTrainedTokenizerBase) -> RawConversationDataset:
    """The data set, with its counts and the first sample as it is trained shown once."""
    main = dist.get_rank() == 0
    dataset = RawConversationDataset(
        tokenizer,
        config.data.dataset,
        config.data.max_length,
        skip_bad_lines=config.data.skip_bad_lines,
        show_progress=main,
    )
    model_config = read_model_config(config.pretrained)
    vocab_size = model_config.get("text_config", model_config).get("vocab_size")
    if vocab_size is not None and dataset.max_token_id() >= vocab_size:
        raise ValueError(
            f"--pretrained {config.pretrained}: the tokenizer makes token {dataset.max_token_id()}, but the model has "
            f"{vocab_size} (vocab_size in config.json): one of the two is of another model"
        )
    if main:
        print_rank_0(dataset.summary(), "first sample, as it is trained:", dataset.show_sample(0))
    return dataset


def make_dataloader(
    config: FinetuneConfig,
    dataset: RawConversationDataset,
    tokenizer: PreTrainedTokenizerBase,
    dp_group: dist.ProcessGroup,
) -> DataLoader:
    """Each sample once an epoch; the same number of micro-batches on every rank, empty ones at the end if need be."""
    if config.data.packing:
        collate = PackedCollator(tokenizer, config.data.max_length, single_row=config.train.use_flash_attn)
    else:
        collate = ConversationCollator(tokenizer)
    sampler = EpochBatchSampler(
        len(dataset),
        config.train.batch_size,
        dist.get_rank(dp_group),
        dist.get_world_size(dp_group),
        seed=config.train.seed,
    )
    # A generator of its own: iterating draws a number, which would move the dropout of a resumed run.
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, generator=torch.Generator())


def build_model(config: FinetuneConfig, plugin: "MoeHybridParallelPlugin") -> PreTrainedModel:
    """This rank's part of the base model, read from its own byte ranges of the checkpoint."""
    model = build_meta_model(config.pretrained, plugin.dtype, use_flash_attn=config.train.use_flash_attn)
    plugin.shard(model)
    report = load_weights(
        model,
        config.pretrained,
        plugin.layout,
        plugin.layout_rank,
        device=current_device(),
        show_progress=dist.get_rank() == 0,
    )
    total = torch.tensor(report.nbytes_read, device=current_device())
    dist.all_reduce(total)
    print_rank_0(f"weights: rank 0 {report.format()}; all {dist.get_world_size()} ranks {format_bytes(total.item())}")
    if config.train.use_grad_checkpoint:
        enable_recompute(model)
    if config.data.packing:
        check_packing_supported(model, single_row=config.train.use_flash_attn)
    return model


def choose_trained(config: FinetuneConfig, booster: "Booster", model: PreTrainedModel) -> None:
    """All weights under `--lora_rank 0`; else a new adapter, or that of `--init_adapter` with its rank and targets."""
    if not config.trains_adapter:
        print_rank_0(f"full fine-tuning: all {structure_of(model).num_parameters:,} parameters are trained")
        return
    start = config.lora.init_adapter
    if start is None:
        booster.enable_lora(model, lora_config=lora_config(config.lora, config.pretrained))
    else:
        adapter, asked, defaults = lora_config_from_adapter(start), config.lora, LoraSettings()
        for name, value in (("lora_rank", adapter.r), ("lora_alpha", adapter.lora_alpha)):
            if getattr(asked, name) not in (getattr(defaults, name), value):
                raise ValueError(f"--{name} is that of --init_adapter {start}, {value}; leave the flag out")
        if asked.lora_targets != defaults.lora_targets:
            wanted, found = (resolve_targets(model, t) for t in (asked.lora_targets, adapter.target_modules))
            if other := set(wanted) ^ set(found):
                path = min(target.path for target in other)
                raise ValueError(f"--lora_targets is not what --init_adapter {start} has, e.g. {path}; leave it out")
        adapter.lora_dropout = asked.lora_dropout
        booster.enable_lora(model, pretrained_dir=start, lora_config=adapter)
    print_rank_0(model.lora_report.format())


def lora_config(settings: LoraSettings, pretrained: str) -> LoraConfig:
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=settings.lora_targets,
        base_model_name_or_path=pretrained,
    )


def make_optimizer(
    config: FinetuneConfig, model: nn.Module, num_batches: int
) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """AdamW over what is trained and its schedule, one value an optimizer step; Gemini takes its own AdamW only."""
    train, adamw = config.train, torch.optim.AdamW
    if config.parallel.plugin.startswith("gemini"):
        from colossalai.nn.optimizer import HybridAdam as adamw
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = adamw(trained, lr=train.lr, betas=(0.9, 0.95), weight_decay=train.weight_decay)
    steps = num_optimizer_steps(num_batches, train.num_epochs, train.accumulation_steps, train.max_steps)
    warmup = max(1, int(0.025 * steps)) if train.warmup_steps is None else train.warmup_steps
    return optimizer, LambdaLR(optimizer, cosine_with_warmup(steps, warmup))


def fit(config: FinetuneConfig, trainer: SFTTrainer, dataset: RawConversationDataset) -> dict[str, Any]:
    """Train, from the state of `--resume` on; returns the run's summary (losses, steps, seconds, how it ended)."""
    main = dist.get_rank() == 0
    save_dir = Path(config.output.save_dir)
    metrics = save_dir / "metrics.jsonl"
    keeper = StateKeeper(
        trainer,
        save_dir=save_dir,
        settings=flatten_config(config),
        data_fingerprint=dataset.fingerprint(),
        save_interval=config.output.save_interval,
        keep_last=config.output.keep_last,
    )
    if config.output.resume is not None:
        keeper.resume(config.output.resume)
    else:
        keeper.start()
    if main and trainer.step == 0 and metrics.exists():
        metrics.replace(save_dir / "metrics.previous.jsonl")
    elif main:
        drop_later_lines(metrics, trainer.step)
    logger = MetricsLogger(
        config.output.tensorboard_dir or save_dir / "tensorboard", metrics, enabled=main, first_step=trainer.step + 1
    )
    start = time.perf_counter()
    try:
        with keeper:
            trainer.fit(logger, show_progress=main, after_step=keeper.after_step)
    finally:
        logger.close()
    return {
        "steps": trainer.step,
        "loss_first": trainer.loss_first,
        "loss_last": trainer.loss_last,
        "seconds": round(time.perf_counter() - start, 1),
        "memory_gb": round(peak_memory_gb(), 2),
        "skipped": _skipped(trainer),
        "stopped": keeper.stopped_by is not None,
    }


def check_training(trainer: SFTTrainer) -> None:
    """Before an export: a collective.

    Raises:
        ValueError: no step was taken, or the trained weights are not finite.
    """
    if trainer.num_taken == 0:
        why = " and ".join(_skipped(trainer))
        raise ValueError(f"none of the {trainer.step} steps was taken: {why}; nothing is saved")
    if hasattr(trainer.optimizer, "state_pieces"):  # Gemini's parameters cannot be read at any time
        check_weights(trainer.model)


def _skipped(trainer: SFTTrainer) -> list[str]:
    """How many steps were left out, by why."""
    lines, scale = [], getattr(trainer.optimizer, "loss_scale", None)
    if trainer.num_skipped:
        lines.append(f"{trainer.num_skipped} steps were not finite and left out")
    if trainer.num_overflowed:
        now = f", which is {scale:g} now" if scale else ""
        lines.append(f"{trainer.num_overflowed} steps overflowed and lowered fp16's loss scale{now}")
    return lines


def save(
    config: FinetuneConfig,
    booster: "Booster",
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    summary: dict[str, Any],
) -> None:
    """Export the adapter, or the model, and say what to do with it."""
    parallel = config.parallel
    sizes = ", ".join(f"{name} {getattr(parallel, name)}" for name in ("ep", "pp", "tp", "sp"))
    card = {
        "Data": f"{config.data.dataset}, {config.train.num_epochs} epoch(s), {summary['steps']} steps",
        "Loss": f"{summary['loss_first']:.4f} at the first step, {summary['loss_last']:.4f} at the last",
        **({"Left out": ", ".join(summary["skipped"])} if summary["skipped"] else {}),
        "Layout": f"{dist.get_world_size()} process(es), plugin {parallel.plugin}, {sizes}",
    }
    save_dir = Path(config.output.save_dir)
    if config.trains_adapter:
        saved = save_dir / ADAPTER_DIR
        booster.checkpoint_io.save_lora_as_pretrained(model, str(saved), tokenizer=tokenizer, card=card)
        check = f"python applications/verify_adapter.py --pretrained {config.pretrained} --adapter {saved}"
        lines = [f"adapter saved in {saved}; check it with", f"  {check}"]
    else:
        saved = save_dir / MODEL_DIR
        booster.checkpoint_io.save_model(model, str(saved), tokenizer=tokenizer)
        lines = [f"model saved in {saved}, under the names of {config.pretrained}"]
    lines = [f"{skipped} (see skipped in metrics.jsonl)" for skipped in summary["skipped"]] + lines
    print_rank_0(
        f"{summary['steps']} steps in {summary['seconds']:.0f} s, loss {summary['loss_first']:.4f} -> "
        f"{summary['loss_last']:.4f}, peak memory {format_bytes(1e9 * summary['memory_gb'])} on rank 0",
        *lines,
    )


def check_router(before: str, after: str) -> None:
    """Raise if training touched the router or its correction bias: the adapter would not be what was trained."""
    if before != after:
        raise ValueError("the router's weights or e_score_correction_bias changed during training; nothing is saved")
