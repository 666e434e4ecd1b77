"""The steps of a fine-tuning command between its flags and its trainer, one function each."""

import json
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from peft import LoraConfig
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from coati_ext.checkpoint_io.keep_fp8 import keep_fp8
from coati_ext.checkpoint_io.load import CONFIG_ERRORS, build_meta_model, load_weights
from coati_ext.config import FinetuneConfig, flatten_config
from coati_ext.dataset import ConversationCollator, EpochBatchSampler, RawConversationDataset
from coati_ext.dataset.packing import PackedCollator, check_packing_supported
from coati_ext.grpo_config import GRPOConfig
from coati_ext.models.compiled import compile_layers
from coati_ext.models.recompute import enable_recompute
from coati_ext.models.targets import structure_of
from coati_ext.moe.kernel_choice import describe_kernels
from coati_ext.trainer.base import StepTrainer
from coati_ext.trainer.nonfinite import check_weights
from coati_ext.trainer.sft import SFTTrainer, cosine_with_warmup, num_optimizer_steps
from coati_ext.trainer.state import StateKeeper, drop_later_lines
from coati_ext.utils.collective import errors_everywhere
from coati_ext.utils.device import current_device, peak_memory_gb
from coati_ext.utils.launch import print_rank_0
from coati_ext.utils.metrics import MetricsLogger
from coati_ext.utils.model_config import read_model_config, text_config_of
from coati_ext.utils.preflight import check_output_is_free, config_path, tensorboard_path
from coati_ext.utils.run_directory import (
    ADAPTER_DIR,
    METRICS_FILE,
    MODEL_DIR,
    drop_previous,
    lock_directory,
    newest_state,
    set_logs_aside,
)
from coati_ext.utils.sizes import format_bytes

if TYPE_CHECKING:
    from colossalai.booster import Booster
    from colossalai.booster.plugin import MoeHybridParallelPlugin

Config = TypeVar("Config", FinetuneConfig, GRPOConfig)
_VERIFY = Path(__file__).parents[2] / "applications" / "verify_adapter.py"


def describe_model(config: FinetuneConfig | GRPOConfig, plugin: "MoeHybridParallelPlugin") -> PreTrainedModel:
    """This rank's part of the base model on the meta device: all of its structure, and no weight read.

    Raises:
        ValueError: config.json makes no model, or none that this layout can share out; see also `keep_fp8`.
    """
    try:
        model = build_meta_model(config.pretrained, plugin.dtype, use_flash_attn=config.train.use_flash_attn)
    except CONFIG_ERRORS as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"--pretrained: {Path(config.pretrained, 'config.json')} makes no model: {reason}") from error
    plugin.shard(model)
    if config.lora.frozen_dtype is not None:
        print_rank_0(keep_fp8(model, config.pretrained, fp8_compute=config.lora.fp8_compute).format())
    return model


def resolve_config(
    config: FinetuneConfig, plugin: "MoeHybridParallelPlugin", num_batches: int
) -> tuple[FinetuneConfig, int]:
    """The config with the defaults that depend on the run in place of None, and the number of optimizer steps."""
    train = config.train
    steps = num_optimizer_steps(num_batches, train.num_epochs, train.accumulation_steps, train.max_steps)
    return with_defaults(config, plugin, steps), steps


def with_defaults(config: Config, plugin: "MoeHybridParallelPlugin", num_steps: int) -> Config:
    """The config with the defaults that depend on the run in place of None."""
    train = config.train
    warmup = max(1, int(0.025 * num_steps)) if train.warmup_steps is None else train.warmup_steps
    return replace(
        config,
        train=replace(train, mixed_precision=plugin.precision, warmup_steps=warmup),
        output=replace(config.output, tensorboard_dir=str(tensorboard_path(config.output))),
    )


def prepare_run(config: FinetuneConfig | GRPOConfig) -> None:
    """Make the run's directory and lock it for as long as rank 0 lives.

    Raises:
        ValueError, OSError: on every rank; another run is in the directory, or has just ended there.
    """
    with errors_everywhere(dist.group.WORLD):
        if dist.get_rank() == 0:
            save_dir = Path(config.output.save_dir)
            save_dir.mkdir(parents=True, exist_ok=True)
            if warning := lock_directory(save_dir):
                print_rank_0(warning)
            check_output_is_free(config)  # again: the run that had the lock may have ended since


def save_config(config: FinetuneConfig | GRPOConfig) -> None:
    """Save the resolved config, which `--config` takes back, without the consent to overwrite (rank 0)."""
    if dist.get_rank() == 0:
        file = config_path(config.output)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({**flatten_config(config), "overwrite": False}, indent=2) + "\n")


def load_tokenizer(pretrained: str, flag: str = "--pretrained") -> PreTrainedTokenizerBase:
    """The tokenizer of a directory; ValueError names the flag and the files that may be at fault."""
    try:
        return AutoTokenizer.from_pretrained(pretrained, local_files_only=True)
    except Exception as error:  # the tokenizers library raises nothing narrower for a file that it cannot use
        files = sorted(file.name for file in Path(pretrained).glob("*token*"))
        reason = " ".join(str(error).split())
        raise ValueError(f"{flag} {pretrained}: no tokenizer can be made of its {files}: {reason}") from error


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
    check_vocabulary(config.pretrained, dataset.max_token_id())
    if main:
        print_rank_0(dataset.summary(), "first sample, as it is trained:", dataset.show_sample(0))
    return dataset


def check_vocabulary(pretrained: str, max_token_id: int) -> None:
    """Raises ValueError for a token that the model does not have."""
    vocab_size = text_config_of(read_model_config(pretrained)).get("vocab_size")
    if vocab_size is not None and max_token_id >= vocab_size:
        raise ValueError(
            f"--pretrained {pretrained}: the tokenizer makes token {max_token_id}, but the model has {vocab_size} "
            "(vocab_size in config.json): one of the two is of another model"
        )


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
    rows = config.train.batch_size * dist.get_world_size(dp_group) * config.train.accumulation_steps
    if len(dataset) < rows:
        print_rank_0(
            f"note: the {len(dataset)} samples are fewer than a global batch of {rows} (--batch_size x data-parallel "
            "ranks x --accumulation_steps): a step takes all of them, each once, and an epoch is one step"
        )
    # A generator of its own: iterating draws a number, which would move the dropout of a resumed run.
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, generator=torch.Generator())


def load_model(config: FinetuneConfig | GRPOConfig, plugin: "MoeHybridParallelPlugin", model: PreTrainedModel) -> None:
    """Fill what `describe_model` made, from this rank's own byte ranges of the checkpoint."""
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


def check_packing(config: FinetuneConfig, model: PreTrainedModel) -> None:
    """Raises ValueError if --packing would mix samples in this model, whose weights are there."""
    if config.data.packing:
        check_packing_supported(model, single_row=config.train.use_flash_attn)


def choose_trained(
    config: FinetuneConfig | GRPOConfig, booster: "Booster", model: PreTrainedModel, lora: LoraConfig | None
) -> None:
    """All weights, or the adapter `lora` with the start values of `--init_adapter` if there is one."""
    if lora is None:
        print_rank_0(f"full fine-tuning: all {structure_of(model).num_parameters:,} parameters are trained")
    else:
        booster.enable_lora(model, pretrained_dir=config.lora.init_adapter, lora_config=lora)
        print_rank_0(model.lora_report.format())
    if (kernels := describe_kernels(model)) is not None:
        print_rank_0(kernels)


def compile_model(config: FinetuneConfig, model: PreTrainedModel) -> None:
    """What --torch_compile asks for.

    Raises:
        ValueError: there is no GPU, or see `compile_layers`.
    """
    if config.train.torch_compile:
        if current_device().type == "cpu":
            raise ValueError("--torch_compile is for GPUs, and this process has none; leave it out")
        count = compile_layers(model)
        print_rank_0(f"torch.compile: {count} modules around the experts, at the first step; it takes some 20 s longer")


def make_optimizer(
    config: FinetuneConfig | GRPOConfig, model: nn.Module, num_steps: int
) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """AdamW over what is trained and its schedule, one value an optimizer step; Gemini takes its own AdamW only.

    On a GPU it is the fused one: one pass over weights and states, and no temporary copies of them.
    """
    train, adamw = config.train, torch.optim.AdamW
    if config.parallel.plugin.startswith("gemini"):
        from colossalai.nn.optimizer import HybridAdam as adamw
    elif current_device().type == "cuda":
        adamw = partial(adamw, fused=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = adamw(trained, lr=train.lr, betas=(0.9, 0.95), weight_decay=train.weight_decay)
    return optimizer, LambdaLR(optimizer, cosine_with_warmup(num_steps, train.warmup_steps))


def begin(
    keeper: StateKeeper, resume: str | None, save_dir: Path, logs: Sequence[str], last_line: Callable[[], int]
) -> None:
    """Take up the state of --resume, or begin at the start, and clear the logs of what is to be done (again).

    Args:
        logs: the files, with a "step" in each line.
        last_line: the "step" of the last line to keep; asked once the state is there.
    """
    if resume is None:
        keeper.start()
    else:
        keeper.resume(resume)
    if dist.get_rank() != 0:
        return
    if keeper.trainer.step == 0 or newest_state(save_dir) is None:  # another directory's state: other logs
        set_logs_aside(save_dir)
        return
    for name in logs:
        drop_later_lines(save_dir / name, last_line())


def fit(config: FinetuneConfig, trainer: SFTTrainer, dataset: RawConversationDataset) -> dict[str, Any]:
    """Train, from the state of `--resume` on; returns the run's summary (losses, steps, seconds, how it ended)."""
    main = dist.get_rank() == 0
    save_dir = Path(config.output.save_dir)
    metrics = save_dir / METRICS_FILE
    keeper = StateKeeper(
        trainer,
        save_dir=save_dir,
        settings=flatten_config(config),
        data_fingerprint=dataset.fingerprint(),
        save_interval=config.output.save_interval,
        keep_last=config.output.keep_last,
    )
    begin(keeper, config.output.resume, save_dir, (METRICS_FILE,), lambda: trainer.step)
    logger = MetricsLogger(tensorboard_path(config.output), metrics, enabled=main, first_step=trainer.step + 1)
    try:
        with keeper:
            trainer.fit(logger, show_progress=main, after_step=keeper.after_step)
    finally:
        logger.close()
    return {
        "steps": trainer.step,
        "loss_first": trainer.loss_first,
        "loss_last": trainer.loss_last,
        "seconds": round(keeper.seconds, 1),
        "memory_gb": round(peak_memory_gb(), 2),
        "skipped": skipped_steps(trainer),
        "stopped": keeper.stopped_by is not None,
    }


def check_training(trainer: StepTrainer) -> None:
    """Before an export: a collective.

    Raises:
        ValueError: no step was taken, or the trained weights are not finite.
    """
    if trainer.num_taken == 0:
        idle = getattr(trainer, "num_idle", 0)
        nothing = (
            [f"{idle} had no two completions of a prompt with different rewards (see the warnings)"] if idle else []
        )
        why = " and ".join([*skipped_steps(trainer), *nothing])
        raise ValueError(f"none of the {trainer.next_update - 1} steps was taken: {why}; nothing is saved")
    if hasattr(trainer.optimizer, "state_pieces"):  # Gemini's parameters cannot be read at any time
        check_weights(trainer.model)


def skipped_steps(trainer: StepTrainer) -> list[str]:
    """How many steps were left out, by why."""
    lines, scale = [], getattr(trainer.optimizer, "loss_scale", None)
    if trainer.num_skipped:
        lines.append(f"{trainer.num_skipped} steps were not finite and left out")
    if trainer.num_overflowed:
        now = f", which is {scale:g} now" if scale else ""
        lines.append(f"{trainer.num_overflowed} steps overflowed and lowered fp16's loss scale{now}")
    return lines


def sft_card(config: FinetuneConfig, summary: dict[str, Any]) -> dict[str, str]:
    """What a model card says of the training, beside what `save` knows."""
    return {
        "Data": f"{os.path.abspath(config.data.dataset)}, {config.train.num_epochs} epoch(s), {summary['steps']} steps",
        "Loss": f"{summary['loss_first']:.4f} at the first step, {summary['loss_last']:.4f} at the last",
    }


def save(
    config: FinetuneConfig | GRPOConfig,
    booster: "Booster",
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    *,
    card: dict[str, str],
    skipped: list[str],
    result: str,
) -> None:
    """Export the adapter, or the model, and say what to do with it.

    Args:
        card: lines of the model card.
        skipped: what was left out, and why.
        result: the line that says what the training came to.
    """
    parallel = config.parallel
    sizes = ", ".join(f"{name} {getattr(parallel, name)}" for name in ("ep", "pp", "tp", "sp"))
    start = config.lora.init_adapter
    card = {
        **card,
        **({"Left out": ", ".join(skipped)} if skipped else {}),
        "Layout": f"{dist.get_world_size()} process(es), plugin {parallel.plugin}, {sizes}",
        **({"Started from": f"the adapter {os.path.abspath(start)} (--init_adapter)"} if start is not None else {}),
    }
    save_dir = Path(config.output.save_dir)
    if config.trains_adapter:
        saved = save_dir / ADAPTER_DIR
        booster.checkpoint_io.save_lora_as_pretrained(model, str(saved), tokenizer=tokenizer, card=card)
        verify = _VERIFY if _VERIFY.is_file() else Path("applications", _VERIFY.name)  # installed without them
        check = ["python", from_here(verify), "--pretrained", config.pretrained, "--adapter", str(saved)]
        lines = [f"adapter saved in {saved}; check it with", f"  {shlex.join(check)}"]
    else:
        saved = save_dir / MODEL_DIR
        booster.checkpoint_io.save_model(model, str(saved), tokenizer=tokenizer, card=card)
        lines = [f"model saved in {saved}, under the names of {config.pretrained}"]
    if dist.get_rank() == 0:
        drop_previous(save_dir)
    print_rank_0(result, *(f"{line} (see skipped in metrics.jsonl)" for line in skipped), *lines)


def sft_result(summary: dict[str, Any]) -> str:
    """The line that says what a fine-tuning came to."""
    return (
        f"{summary['steps']} steps in {summary['seconds']:.0f} s, loss {summary['loss_first']:.4f} -> "
        f"{summary['loss_last']:.4f}, peak memory {format_bytes(1e9 * summary['memory_gb'])} on rank 0"
    )


def from_here(path: Path) -> str:
    """The path from the current directory where that is below it, else the absolute one."""
    path, here = path.absolute(), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def check_router(before: str, after: str) -> None:
    """Raise if training touched the router or its correction bias: the adapter would not be what was trained."""
    if before != after:
        raise ValueError("the router's weights or e_score_correction_bias changed during training; nothing is saved")
