"""What can be known to be wrong from the model's structure, on the meta device: before tokens and weights.

`utils.preflight` comes earlier and knows the flags and small files only.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from peft import LoraConfig
from transformers import PreTrainedModel

from coati_ext.checkpoint_io.adapter_config import lora_config_from_adapter
from coati_ext.checkpoint_io.adapter_fit import check_adapter_fits
from coati_ext.checkpoint_io.checkpoint import Checkpoint, read_checkpoint
from coati_ext.checkpoint_io.fp8_format import FP8_DTYPES
from coati_ext.checkpoint_io.hf_directory import DEFAULT_MAX_SHARD_BYTES
from coati_ext.checkpoint_io.state_manifest import checkpoints, is_checkpoint
from coati_ext.config import FinetuneConfig, LoraSettings, OutputConfig
from coati_ext.grpo_config import GRPOConfig
from coati_ext.models.targets import Candidate, resolve_targets, structure_of
from coati_ext.utils.run_directory import STATES_DIR
from coati_ext.utils.space import Saved, check_space

if TYPE_CHECKING:
    from colossalai.booster.plugin import MoeHybridParallelPlugin

_STATE_BYTES = 12  # of a trained parameter: its fp32 value and AdamW's two moments


def check_start(
    config: FinetuneConfig | GRPOConfig, plugin: "MoeHybridParallelPlugin", model: PreTrainedModel
) -> LoraConfig | None:
    """Targets, --init_adapter, the checkpoint's files, the state of --resume DIR, and room for what will be saved.

    Args:
        model: on the meta device, sharded or whole.

    Returns:
        The adapter to train; None for all weights.

    Raises:
        ValueError, OSError: naming the flag or the file.
    """
    check_states(config.output)
    checkpoint = read_checkpoint(config.pretrained)
    lora, trained = None, structure_of(model).num_parameters
    if config.trains_adapter:
        lora, targets = choose_lora(config, model)
        trained = sum(lora.r * (t.in_features + t.out_features) * t.num_matrices for t in targets)
    saved = what_is_saved(config, trained, plugin.dtype, checkpoint, dist.get_world_size())
    check_space("--save_dir", config.output.save_dir, saved)
    return lora


def choose_lora(config: FinetuneConfig | GRPOConfig, model: PreTrainedModel) -> tuple[LoraConfig, list[Candidate]]:
    """A new adapter, or that of `--init_adapter` with its rank, alpha and targets; and what it is on.

    `utils.adapter_files.check_init_adapter` has compared the flags with it.
    """
    asked, start = config.lora, config.lora.init_adapter
    if start is None:
        lora = LoraConfig(
            task_type="CAUSAL_LM",
            r=asked.lora_rank,
            lora_alpha=asked.lora_alpha,
            lora_dropout=asked.lora_dropout,
            target_modules=asked.lora_targets,
            base_model_name_or_path=config.pretrained,
        )
        return lora, _resolve(model, asked.lora_targets, "--lora_targets")
    flag = f"--init_adapter {start}"
    try:
        lora = lora_config_from_adapter(start)
        check_adapter_fits(model, start)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None
    targets = _resolve(model, lora.target_modules, flag)
    if asked.lora_targets != LoraSettings().lora_targets:
        wanted = _resolve(model, asked.lora_targets, "--lora_targets")
        if other := set(wanted) ^ set(targets):
            path = min(target.path for target in other)
            raise ValueError(f"--lora_targets is not what {flag} has, e.g. {path}; leave it out")
    lora.lora_dropout = asked.lora_dropout
    return lora, targets


def _resolve(model: PreTrainedModel, targets: list[str], flag: str) -> list[Candidate]:
    try:
        return resolve_targets(model, targets)
    except ValueError as error:
        raise ValueError(re.sub("^lora_targets", lambda _: flag, str(error))) from None


def check_states(output: OutputConfig) -> None:
    """Raises ValueError if `--resume DIR` has no state."""
    root = Path(output.save_dir) / STATES_DIR
    if output.resume not in (None, "latest"):
        which = Path(output.resume)
        if not (checkpoints(which / STATES_DIR) or is_checkpoint(which)):
            raise ValueError(
                f"--resume {which}: no state of a training; give one, such as {root}/step-00000100, the --save_dir of "
                "a run that saved some, or latest"
            )


def what_is_saved(
    config: FinetuneConfig | GRPOConfig, num_trained: int, dtype: torch.dtype, checkpoint: Checkpoint, num_ranks: int
) -> list[Saved]:
    """The sizes of a run's results and states; a little less than they will be."""
    output = config.output
    nbytes = num_trained * dtype.itemsize
    result = Saved(what="the adapter", nbytes=nbytes, largest_file=nbytes)
    if not config.trains_adapter:
        nbytes = sum(e.nbytes * (2 if e.dtype in FP8_DTYPES else 1) for e in checkpoint.tensors.values())
        result = Saved(what="the model", nbytes=nbytes, largest_file=min(nbytes, DEFAULT_MAX_SHARD_BYTES))
    if not output.save_interval:
        return [result]
    there = len(checkpoints(Path(output.save_dir) / STATES_DIR))
    number = max(1, output.keep_last + 1 - there)  # a new one is complete before the oldest is deleted
    if config.most_states is not None:
        number = min(number, config.most_states)
    state = num_trained * _STATE_BYTES
    states = Saved(what=f"{number} state(s) of --save_interval", nbytes=number * state, largest_file=state // num_ranks)
    return [result, states] if number else [result]
