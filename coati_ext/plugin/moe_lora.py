"""Booster plugin for transformers 5 decoders: expert, pipeline, data parallelism and ZeRO, with LoRA or full weights.

    booster = Booster(plugin=MoeLoraPlugin(ep_size=2))
    model = booster.enable_lora(model, lora_config=LoraConfig(r=8, target_modules=["mlp"]))
    model, optimizer, *_ = booster.boost(model, optimizer)
    booster.backward(loss, optimizer)
    booster.save_lora_as_pretrained(model, "adapter")

Data is sharded over `dp_group` (dp = ep x moe_dp), experts over the ranks of an EP group, layers over the stages of a
pipeline. The gradient of every parameter, expert or not, is the mean over the dp ranks of the gradient of each rank's
own loss. With `pp_size` > 1 a step is `booster.execute_pipeline(iter([micro_batches]), model, criterion, optimizer)`;
its loss is the sum over the micro-batches.
"""

from collections.abc import Callable
from types import MethodType

import torch
import torch.distributed as dist
from colossalai.accelerator import get_accelerator
from colossalai.booster.plugin import MoeHybridParallelPlugin
from colossalai.booster.plugin.hybrid_parallel_plugin import get_param_info
from colossalai.interface import ModelWrapper, OptimizerWrapper
from peft import LoraConfig
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from coati_ext.checkpoint_io.adapter import load_adapter, lora_config_from_adapter
from coati_ext.checkpoint_io.layout import Layout
from coati_ext.checkpoint_io.names import expert_names
from coati_ext.models.lora import inject_lora
from coati_ext.models.sequence_parallel import shard_sequence
from coati_ext.models.shard import shard_decoder
from coati_ext.models.targets import structure_of
from coati_ext.models.tensor_parallel_layers import Cut
from coati_ext.moe.experts import MoeExperts
from coati_ext.plugin.checkpoint import MoeLoraCheckpointIO
from coati_ext.plugin.module import DecoderModule, drop_frozen, freeze_fp32
from coati_ext.plugin.policy import DecoderPolicy
from coati_ext.plugin.schedule import MicroBatchSchedule
from coati_ext.plugin.zero import NO_ADAPTER, DecoderZeroOptimizer

# Accepted because colossalai's scripts pass them; they only choose kernels, which transformers chooses here.
_KERNEL_SWITCHES = (
    "enable_all_optimization",
    "enable_fused_normalization",
    "enable_flash_attention",
    "enable_jit_fused",
)
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class MoeLoraPlugin(MoeHybridParallelPlugin):
    """`MoeHybridParallelPlugin` with the same arguments; what is not right is refused by name.

    Args:
        tp_size: ranks that share each matrix; for dense models.
        pp_size: pipeline stages.
        ep_size: ranks that share the experts of a layer; must divide the number of experts and of data-parallel ranks.
        precision: "bf16", "fp16" or "fp32"; the default is bf16 on accelerators and fp32 on CPUs.
        zero_stage: what the data-parallel ranks share out: 0 nothing, 1 the optimizer's states, 2 gradients as well
            (not with a pipeline: it would reduce at every micro-batch).
        num_layers_per_stage: default: as even as can be, see `checkpoint_io.layout.distribute_layers`.
        max_norm: clip the gradient norm to this; 0 does not clip.
        cpu_offload: keep the optimizer's fp32 parameters and states in host memory.
        sp_size: ranks that share each row of a batch, under `sequence_parallelism_mode` "all_to_all".
        enable_sequence_parallelism: with the mode "split_gather" (default), cut the hidden states between the matrices
            of tensor parallelism along the sequence; with "all_to_all" each rank has a part of the row and attention
            exchanges heads for it (Ulysses).
        kwargs: the other arguments of `MoeHybridParallelPlugin`; those that size micro-batches have no effect.

    Raises:
        ValueError: a layout that cannot be run, with the numbers in conflict; or no process group yet.
    """

    def __init__(
        self,
        tp_size: int = 1,
        pp_size: int = 1,
        ep_size: int = 1,
        sp_size: int | None = None,
        precision: str | None = None,
        zero_stage: int = 1,
        num_layers_per_stage: list[int] | None = None,
        **kwargs,
    ):
        if not dist.is_initialized():
            raise ValueError(
                "MoeLoraPlugin: the processes are not connected yet: call colossalai.launch_from_torch(seed=42) first, "
                "in a script that is started with torchrun --nproc_per_node N script.py"
            )
        sp_size = sp_size or 1
        _check_layout(tp_size, pp_size, ep_size, sp_size, zero_stage, kwargs)
        if precision is None:
            precision = "fp32" if get_accelerator().name == "cpu" else "bf16"
        if precision not in _DTYPES:
            raise ValueError(f"precision must be bf16, fp16 or fp32, got {precision!r}")
        dp_size = dist.get_world_size() // (tp_size * pp_size * sp_size)
        layers = tuple(num_layers_per_stage) if num_layers_per_stage else None
        self.layout = Layout(ep=ep_size, pp=pp_size, tp=tp_size, dp=dp_size, num_layers_per_stage=layers)
        ignored = [name for name in _KERNEL_SWITCHES if kwargs.pop(name, False)]
        kwargs.setdefault("custom_policy", DecoderPolicy(self.shard))
        kwargs.setdefault("microbatch_size", 1)
        mode = kwargs.pop("sequence_parallelism_mode", None) or "split_gather"
        self.splits_sequence = kwargs.pop("enable_sequence_parallelism", False) and mode == "split_gather"
        if sp_size > 1:
            kwargs |= {"sp_size": sp_size, "enable_sequence_parallelism": True, "sequence_parallelism_mode": mode}
        super().__init__(tp_size=tp_size, pp_size=pp_size, ep_size=ep_size, precision=precision, zero_stage=1, **kwargs)
        self.shard_config.enable_sequence_parallelism = False  # what colossalai would do for it is done here
        if sp_size > 1:
            axes = [self.moe_dp_axis, self.sp_axis]
            self.moe_dp_group = self.pg_mesh.create_group_along_axis(axes)  # upstream's leaves the sp ranks out
        # Upstream turns stage 2 into 1, since its experts get no gradient without a token; these always get one.
        self.zero_stage = zero_stage
        self.zero_config["partition_grad"] = zero_stage == 2
        if ignored:
            self.logger.warning(f"MoeLoraPlugin: {ignored} have no effect; transformers picks the kernels", ranks=[0])

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return _DTYPES[self.precision]

    @property
    def layout_rank(self) -> int:
        """This process's rank in `layout`, by which it reads its part of a checkpoint."""
        return dist.get_rank() // self.sp_size

    def __del__(self):
        if hasattr(self, "pg_mesh"):  # absent when the constructor refused
            super().__del__()

    def support_no_sync(self) -> bool:
        return self.zero_stage < 2  # stage 2 keeps no whole gradient between micro-batches

    def get_checkpoint_io(self) -> MoeLoraCheckpointIO:
        return MoeLoraCheckpointIO(
            self.mixed_dp_group,
            self.pp_group,
            self.tp_group,
            self.sp_group,
            self.ep_group,
            self.moe_dp_group,
            self.zero_stage,
            ep_group=self.ep_group,
            layout=self.layout,
            layout_rank=self.layout_rank,
        )

    def shard(self, model: nn.Module) -> None:
        """Keep this rank's part of a whole model, in place; `enable_lora` and `boost` do it where it was not done.

        On the meta device it costs nothing, and `checkpoint_io.load.load_weights` then reads this rank's part alone.
        """
        stages = self.layout.layers_per_stage(_num_layers(model)) if self.pp_size > 1 else ()
        stage = self.layout.coordinates(self.layout_rank).pp
        shard_decoder(
            model,
            ep_group=self.ep_group,
            tp_group=self.tp_group,
            sequence_parallel=self.splits_sequence,
            layers_per_stage=stages,
            stage=stage,
        )
        if self.sp_size > 1:
            shard_sequence(model, self.sp_group)

    def enable_lora(
        self,
        model: nn.Module,
        pretrained_dir: str | None = None,
        lora_config: LoraConfig | None = None,
        bnb_quantization_config: object | None = None,
    ) -> nn.Module:
        """Shard the model and inject LoRA, in place; the model itself is returned.

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
        if structure_of(model).num_experts:
            expert_names(model.config.model_type)  # refuses families whose adapter PEFT would drop, before training
        self.lora_enabled = True
        self.shard(model)
        inject_lora(model, lora_config, ep_group=self.ep_group, seed=_seed_of_rank_0())
        if pretrained_dir is not None:
            load_adapter(model, pretrained_dir, pp_group=self.pp_group if self.pp_size > 1 else None)
        if not any(p.requires_grad for p in model.parameters()):
            # An optimizer needs a parameter. This one is in no forward, so it gets no gradient and is never changed.
            model.register_parameter(NO_ADAPTER, nn.Parameter(torch.zeros(1)))
        return model

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> tuple[nn.Module, OptimizerWrapper, Callable, DataLoader, LRScheduler]:
        """As upstream's, but ZeRO also runs in fp32 and the optimizer knows the two reduction groups.

        In full fine-tuning under bf16 or fp16, weights that the model keeps in fp32 are frozen, see `freeze_fp32`.
        """
        if not isinstance(model, ModelWrapper):
            freeze_fp32(model, self.dtype, self.logger)
        if optimizer is not None and not isinstance(optimizer, OptimizerWrapper):
            drop_frozen(optimizer)
        param_info = get_param_info(optimizer)
        if not isinstance(model, ModelWrapper):
            model = self._wrap(model)
        if optimizer is not None and not isinstance(optimizer, OptimizerWrapper):
            optimizer = DecoderZeroOptimizer(
                optimizer,
                model,
                param_info=param_info,
                zero_stage=self.zero_stage,
                dp_process_group=self.mixed_dp_group,
                moe_dp_group=self.moe_dp_group,
                alone=self._group_of_one(),
                tp_process_group=self.tp_group,
                pp_process_group=self.pp_group,
                clip_grad_norm=self.max_norm,
                **self.zero_config,
                **self.amp_config,
            )
            model.update_master_params = MethodType(optimizer.update_master_params, model)
        return model, optimizer, criterion, dataloader, lr_scheduler

    def _wrap(self, model: nn.Module) -> DecoderModule:
        self.shard(model)
        for module in model.modules():
            if isinstance(module, MoeExperts):
                self._mark_expert_parameters(module)
        if self.stage_manager is not None:
            width = model.config.get_text_config().hidden_size
            self.scheduler = MicroBatchSchedule(self.stage_manager, hidden_size=width, dtype=self.dtype)
        wrapped = DecoderModule(
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
        for module in model.modules():
            if isinstance(module, MoeExperts):
                module.pack()
        return wrapped

    def _group_of_one(self) -> dist.ProcessGroup:
        axes = (self.tp_group, self.sp_group, self.pp_group, self.ep_group, self.moe_dp_group)
        found = next((group for group in axes if dist.get_world_size(group) == 1), None)
        return dist.new_subgroups(group_size=1)[0] if found is None else found

    def _mark_expert_parameters(self, experts: MoeExperts) -> None:
        """Expert parameters belong to the MoE-DP group, and their gradients must be a mean over all dp ranks.

        An expert's gradient already holds the sum over its EP group (the tokens came from there), and ZeRO divides by
        the MoE-DP size only; the EP size is what is missing.
        """
        first, last = experts.first_expert, experts.first_expert + experts.num_local_experts
        for parameter in experts.parameters():
            parameter.ep_cut = Cut(0, first, last, experts.num_experts)
            parameter.ep_group = self.ep_group  # colossalai's mark of a MoE tensor (tensor/moe_tensor/api.py)
            if parameter.requires_grad and self.ep_size > 1:
                parameter.register_hook(lambda grad, scale=1 / self.ep_size: grad * scale)


def _check_layout(tp: int, pp: int, ep: int, sp: int, zero_stage: int, kwargs: dict) -> None:
    _check_sequence_parallelism(tp, pp, sp, kwargs)
    if kwargs.get("use_fp8") or kwargs.get("fp8_communication"):
        raise ValueError("MoeLoraPlugin: use_fp8 and fp8_communication are not supported")
    if kwargs.get("overlap_communication"):
        raise ValueError("MoeLoraPlugin: overlap_communication hangs when an expert gets no token; leave it off")
    if kwargs.get("overlap_allgather") or not kwargs.get("moe_dp_outside", True):
        raise ValueError("MoeLoraPlugin: overlap_allgather and moe_dp_outside=False are not supported")
    if kwargs.get("gradient_checkpoint_config") is not None:
        raise ValueError("MoeLoraPlugin: gradient_checkpoint_config is not supported; call enable_recompute(model)")
    if kwargs.get("pp_style", "1f1b") != "1f1b":
        raise ValueError(f"MoeLoraPlugin: pp_style={kwargs['pp_style']!r} is not supported; accepted: '1f1b'")
    if zero_stage not in (0, 1, 2):
        raise ValueError(f"MoeLoraPlugin: zero_stage must be 0, 1 or 2, got {zero_stage}")
    if zero_stage == 2 and pp > 1:
        raise ValueError(
            f"MoeLoraPlugin: zero_stage=2 with pp_size={pp} would reduce at every micro-batch; use zero_stage=1"
        )
    world_size = dist.get_world_size()
    if min(tp, pp, ep, sp) < 1 or world_size % (tp * pp * ep * sp):
        sizes = f"tp_size={tp} x pp_size={pp} x sp_size={sp} x ep_size={ep}"
        raise ValueError(f"MoeLoraPlugin: {sizes} does not divide the world size {world_size}")


def _check_sequence_parallelism(tp: int, pp: int, sp: int, kwargs: dict) -> None:
    if not kwargs.get("enable_sequence_parallelism"):
        if sp > 1:
            raise ValueError(f"MoeLoraPlugin: sp_size={sp} needs enable_sequence_parallelism=True")
        return
    mode = kwargs.get("sequence_parallelism_mode") or "split_gather"
    if mode not in ("split_gather", "all_to_all"):
        raise ValueError(
            f"MoeLoraPlugin: sequence_parallelism_mode={mode!r} is not supported (colossalai's ring gives wrong "
            "gradients); accepted: 'split_gather', 'all_to_all'"
        )
    if mode == "all_to_all" and (sp == 1 or tp > 1):
        raise ValueError(f"MoeLoraPlugin: all_to_all needs sp_size > 1 and tp_size=1, got {sp} and {tp}")
    if mode == "split_gather" and (tp == 1 or pp > 1 or sp > 1):
        raise ValueError(
            f"MoeLoraPlugin: split_gather needs tp_size > 1 and no pp_size or sp_size, got {tp}, {pp} and {sp}"
        )


def _num_layers(model: nn.Module) -> int:
    return model.config.get_text_config().num_hidden_layers


def _seed_of_rank_0() -> int:
    seed = [torch.initial_seed()]
    dist.broadcast_object_list(seed, src=0)
    return seed[0]
