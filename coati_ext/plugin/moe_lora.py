"""Booster plugin: LoRA on MoE models under expert and data parallelism, through colossalai's own LoRA API.

    booster = Booster(plugin=MoeLoraPlugin(ep_size=2))
    model = booster.enable_lora(model, lora_config=LoraConfig(r=8, target_modules=["mlp"]))
    model, optimizer, *_ = booster.boost(model, optimizer)
    booster.backward(loss, optimizer)
    booster.save_lora_as_pretrained(model, "adapter")

Data is sharded over all ranks (dp = ep x moe_dp), experts over the ranks of an EP group. The gradient of every
parameter, expert or not, is the mean over the dp ranks of the gradient of each rank's own loss.
"""

from collections.abc import Callable
from types import MethodType

import torch
import torch.distributed as dist
from colossalai.accelerator import get_accelerator
from colossalai.booster.plugin import MoeHybridParallelPlugin
from colossalai.booster.plugin.hybrid_parallel_plugin import HybridParallelModule, get_param_info
from colossalai.interface import ModelWrapper, OptimizerWrapper
from peft import LoraConfig
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from coati_ext.checkpoint_io.adapter import load_adapter, lora_config_from_adapter
from coati_ext.checkpoint_io.names import expert_names
from coati_ext.models.lora import inject_lora
from coati_ext.moe.experts import MoeExperts, is_experts_module
from coati_ext.plugin.checkpoint import MoeLoraCheckpointIO
from coati_ext.plugin.policy import DecoderPolicy
from coati_ext.plugin.zero import MoeLoraZeroOptimizer

# Accepted because colossalai's scripts pass them; they only choose kernels, which transformers chooses here.
_KERNEL_SWITCHES = (
    "enable_all_optimization",
    "enable_fused_normalization",
    "enable_flash_attention",
    "enable_jit_fused",
)


class MoeLoraPlugin(MoeHybridParallelPlugin):
    """`MoeHybridParallelPlugin` for LoRA: same arguments, fewer accepted values, each refused by name.

    Args:
        ep_size: ranks that share the experts of a layer; must divide the world size and the number of experts.
        precision: "bf16", "fp16" or "fp32"; the default is bf16 on accelerators and fp32 on CPUs.
        zero_stage: 1 only. Stage 0 reduces through DDP, which knows one group where MoE needs two; stage 2 hangs when
            an expert gets no token.
        max_norm: clip the gradient norm to this; 0 does not clip.
        cpu_offload: keep the optimizer's fp32 parameters and states in host memory.
        kwargs: the other arguments of `MoeHybridParallelPlugin`.

    Raises:
        ValueError: a layout that cannot be run, with the numbers in conflict.
    """

    def __init__(
        self,
        tp_size: int = 1,
        pp_size: int = 1,
        ep_size: int = 1,
        sp_size: int | None = None,
        precision: str | None = None,
        zero_stage: int = 1,
        **kwargs,
    ):
        _check_layout(tp_size, pp_size, ep_size, sp_size, zero_stage, kwargs)
        if precision is None:
            precision = "fp32" if get_accelerator().name == "cpu" else "bf16"
        if precision not in ("bf16", "fp16", "fp32"):
            raise ValueError(f"precision must be bf16, fp16 or fp32, got {precision!r}")
        ignored = [name for name in _KERNEL_SWITCHES if kwargs.pop(name, False)]
        kwargs.setdefault("custom_policy", DecoderPolicy())
        super().__init__(
            tp_size=tp_size, pp_size=pp_size, ep_size=ep_size, precision=precision, zero_stage=zero_stage, **kwargs
        )
        if ignored:
            self.logger.warning(f"MoeLoraPlugin: {ignored} have no effect; transformers picks the kernels", ranks=[0])

    def __del__(self):
        if hasattr(self, "pg_mesh"):  # absent when the constructor refused
            super().__del__()

    def get_checkpoint_io(self) -> MoeLoraCheckpointIO:
        return MoeLoraCheckpointIO(
            self.mixed_dp_group,
            self.pp_group,
            self.tp_group,
            self.sp_group,
            self.ep_group,
            self.moe_dp_group,
            self.zero_stage,
        )

    def enable_lora(
        self,
        model: nn.Module,
        pretrained_dir: str | None = None,
        lora_config: LoraConfig | None = None,
        bnb_quantization_config: object | None = None,
    ) -> nn.Module:
        """Shard the experts over the EP group and inject LoRA, in place; the model itself is returned.

        Args:
            model: a transformers 5 decoder with its weights loaded, before `boost`.
            pretrained_dir: start from this PEFT adapter. Without `lora_config` its own targets and rank are used.
            lora_config: PEFT's, see `coati_ext.models.lora.inject_lora` for what is supported.
        """
        if isinstance(model, ModelWrapper):
            raise ValueError("enable_lora must come before boost: the model is wrapped already")
        if bnb_quantization_config is not None:
            raise ValueError("enable_lora(quantize=True) is not supported: bitsandbytes cannot hold stacked experts")
        if lora_config is None:
            lora_config = lora_config_from_adapter(pretrained_dir)
        if any(is_experts_module(module) for module in model.modules()):
            expert_names(model.config.model_type)  # refuses families whose adapter PEFT would drop, before training
        self.lora_enabled = True
        inject_lora(model, lora_config, ep_group=self.ep_group, seed=_seed_of_rank_0())
        if pretrained_dir is not None:
            load_adapter(model, pretrained_dir)
        return model

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> tuple[nn.Module, OptimizerWrapper, Callable, DataLoader, LRScheduler]:
        """As upstream's, but ZeRO also runs in fp32 and the optimizer knows the two reduction groups."""
        param_info = get_param_info(optimizer)
        if not isinstance(model, ModelWrapper):
            model = self._wrap(model)
        if optimizer is not None and not isinstance(optimizer, OptimizerWrapper):
            optimizer = MoeLoraZeroOptimizer(
                optimizer,
                model,
                use_pipeline=True,  # keeps only the parameters that this rank holds
                param_info=param_info,
                dp_process_group=self.mixed_dp_group,
                tp_process_group=self.tp_group,
                pp_process_group=self.pp_group,
                moe_dp_group=self.moe_dp_group,
                clip_grad_norm=self.max_norm,
                **self.zero_config,
                **self.amp_config,
            )
            model.update_master_params = MethodType(optimizer.update_master_params, model)
        return model, optimizer, criterion, dataloader, lr_scheduler

    def _wrap(self, model: nn.Module) -> HybridParallelModule:
        if getattr(model, "lora_config", None) is None:
            raise ValueError(
                "MoeLoraPlugin trains LoRA only: call booster.enable_lora(model, lora_config=…) before booster.boost"
            )
        for module in model.modules():
            if isinstance(module, MoeExperts):
                self._mark_expert_parameters(module)
        kept = _kept_in_their_precision(model)
        wrapped = HybridParallelModule(
            module=model,
            precision=self.precision,
            shard_config=self.shard_config,
            dp_group=self.mixed_dp_group,
            tp_group=self.tp_group,
            sp_group=self.sp_group,
            use_ddp=False,
            ddp_config=self.ddp_config,
            custom_policy=self.custom_policy,
        )
        _restore(model, kept)
        return wrapped

    def _mark_expert_parameters(self, experts: MoeExperts) -> None:
        """Expert parameters belong to the MoE-DP group, and their gradients must be a mean over all dp ranks.

        An expert's gradient already holds the sum over its EP group (the tokens came from there), and ZeRO divides by
        the MoE-DP size only; the EP size is what is missing.
        """
        for parameter in experts.parameters():
            parameter.ep_group = self.ep_group  # colossalai's mark of a MoE tensor (tensor/moe_tensor/api.py)
            if parameter.requires_grad and self.ep_size > 1:
                parameter.register_hook(lambda grad, scale=1 / self.ep_size: grad * scale)


def _check_layout(tp: int, pp: int, ep: int, sp: int | None, zero_stage: int, kwargs: dict) -> None:
    for name, size in (("tp_size", tp), ("pp_size", pp), ("sp_size", sp or 1)):
        if size != 1:
            raise ValueError(f"MoeLoraPlugin: {name}={size} is not built yet; this release runs ep x dp ({name}=1)")
    if kwargs.get("enable_sequence_parallelism"):
        raise ValueError("MoeLoraPlugin: enable_sequence_parallelism is not built yet")
    if kwargs.get("use_fp8") or kwargs.get("fp8_communication"):
        raise ValueError("MoeLoraPlugin: use_fp8 and fp8_communication are not supported")
    if kwargs.get("overlap_communication"):
        raise ValueError("MoeLoraPlugin: overlap_communication hangs when an expert gets no token; leave it off")
    if zero_stage != 1:
        raise ValueError(
            f"MoeLoraPlugin: zero_stage={zero_stage}, but only 1 is right for MoE: 0 goes through DDP, which reduces "
            "over one group only, and 2 hangs when an expert gets no token"
        )
    world_size = dist.get_world_size()
    if ep < 1 or world_size % ep:
        raise ValueError(f"MoeLoraPlugin: ep_size={ep} does not divide the world size {world_size}")


def _seed_of_rank_0() -> int:
    seed = [torch.initial_seed()]
    dist.broadcast_object_list(seed, src=0)
    return seed[0]


def _kept_in_their_precision(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the tensors that a cast of the whole model would harm: all floating-point buffers (rotary frequencies,
    `e_score_correction_bias`: bf16 would change positions and routing) and what the model class keeps in fp32."""
    attributes = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    keep = {name for attribute in attributes for name in getattr(model, attribute, None) or ()}
    tensors = dict(model.named_buffers())
    tensors.update({name: p for name, p in model.named_parameters() if keep.intersection(name.split("."))})
    return {name: tensor.detach().clone() for name, tensor in tensors.items() if tensor.is_floating_point()}


def _restore(model: nn.Module, kept: dict[str, torch.Tensor]) -> None:
    for name, value in kept.items():
        path, _, leaf = name.rpartition(".")
        tensor = getattr(model.get_submodule(path), leaf)  # looked up anew: a cast makes new buffers
        tensor.data = value.to(tensor.device)
