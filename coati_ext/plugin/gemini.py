"""ColossalAI's Gemini for full fine-tuning of dense models on GPUs: parameters in chunks that move between devices.

As it is upstream, with what the command expects of a plugin. It has no LoRA and no gradient accumulation without a
sync, and its optimizers are compiled when they are first used (HybridAdam: a CUDA toolkit with nvcc, minutes).
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from colossalai.accelerator import get_accelerator
from colossalai.booster.plugin import GeminiPlugin
from colossalai.booster.plugin.gemini_plugin import GeminiCheckpointIO
from colossalai.interface import ModelWrapper, OptimizerWrapper
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from coati_ext.checkpoint_io.hf_directory import CARD_NAME
from coati_ext.checkpoint_io.layout import Layout
from coati_ext.checkpoint_io.load import build_meta_model
from coati_ext.checkpoint_io.model_card import full_model_card
from coati_ext.models.targets import structure_of
from coati_ext.plugin.module import drop_frozen, freeze_fp32

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class FullGeminiPlugin(GeminiPlugin):
    """`GeminiPlugin` for the command; `placement_policy` is "static" or "auto".

    Raises:
        ValueError: no GPU, fp32, or no gradient clipping (without it Gemini has no gradient norm to show).
    """

    def __init__(self, *, precision: str | None, placement_policy: str, max_norm: float, accumulates: bool):
        if get_accelerator().name == "cpu":
            raise ValueError("--plugin gemini needs a GPU; use --plugin zero2")
        precision = precision or "bf16"
        if precision not in _DTYPES:
            raise ValueError(f"--plugin gemini runs in bf16 or fp16, not {precision}; use --plugin zero2")
        if max_norm <= 0:
            raise ValueError("--plugin gemini computes the gradient norm only to clip it; give --grad_clip above 0")
        self.precision, self.dtype = precision, _DTYPES[precision]
        super().__init__(
            precision=precision,
            placement_policy=placement_policy,
            max_norm=max_norm,
            enable_gradient_accumulation=accumulates,
        )
        self.layout, self.layout_rank = Layout(dp=dist.get_world_size()), dist.get_rank()
        self.dp_group = self.mixed_dp_group = self.zero_group

    def __del__(self):
        if hasattr(self, "pg_mesh"):  # absent when the constructor refused
            super().__del__()

    def shard(self, model: nn.Module) -> None:
        """Nothing: Gemini shares out the parameters itself when the model is boosted.

        Raises:
            ValueError: the model has routed experts.
        """
        if structure_of(model).num_experts:
            raise ValueError(f"--plugin gemini is for dense models; use --plugin moe for {type(model).__name__}")

    def configure(
        self, model: nn.Module, optimizer: Optimizer | None = None, *args: Any, **kwargs: Any
    ) -> tuple[nn.Module, OptimizerWrapper, Any, Any, Any]:
        """As upstream's, with what the model keeps in fp32 frozen, see `freeze_fp32`."""
        if not isinstance(model, ModelWrapper):
            freeze_fp32(model, self.dtype, self.logger)
        if optimizer is not None and not isinstance(optimizer, OptimizerWrapper):
            drop_frozen(optimizer)
        return super().configure(model, optimizer, *args, **kwargs)

    def get_checkpoint_io(self) -> "_CheckpointIO":
        return _CheckpointIO()


class _CheckpointIO(GeminiCheckpointIO):
    def save_model(
        self,
        model: ModelWrapper,
        checkpoint: str,
        *_: Any,
        tokenizer: PreTrainedTokenizerBase | None = None,
        card: dict[str, str] | None = None,
        **__: Any,
    ) -> None:
        """Write a Hugging Face directory from rank 0, which gathers the whole model on its host; all ranks call it."""
        state = model.state_dict(only_rank_0=True)
        if dist.get_rank() == 0:
            inner = model.unwrap()
            whole = build_meta_model(inner.name_or_path, next(iter(state.values())).dtype)
            buffers = {name: buffer for name, buffer in whole.state_dict().items() if not buffer.is_meta}
            whole.load_state_dict(buffers | state, assign=True, strict=False)
            whole.tie_weights()
            missing = [name for name, tensor in whole.state_dict().items() if tensor.is_meta]
            if missing:
                raise ValueError(f"save_model: Gemini gave no {missing[0]}; nothing is saved")
            whole.save_pretrained(Path(checkpoint))
            if tokenizer is not None:
                tokenizer.save_pretrained(checkpoint)
            text = full_model_card(inner.name_or_path, "fully fine-tuned", card or {})
            Path(checkpoint, CARD_NAME).write_text(text)
        dist.barrier()
