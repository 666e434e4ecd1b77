"""One experts layer for every MoE family of transformers 5: EP-sharded frozen weights, split LoRA per expert.

transformers 5 keeps the routed experts of a block in one module with two stacked tensors and calls it as
`experts(hidden, top_k_index, top_k_weights)` in every family. `MoeExperts` takes that module's place, so that routers,
shared experts and decoder layers stay the model's own.

Legend: T tokens, K top-k, R rows on this rank, E experts, L = E / ep_size experts of this rank, H hidden,
I expert intermediate, r rank.

The LoRA path is x·A·B beside the frozen product, per expert: never W+ΔW, never a gradient of W, and numerics that do
not depend on the EP size. Left out: experts with bias, interleaved or transposed weights (gpt-oss, aria) and experts
without a gate (nemotron-h); they are refused by name.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers.activations import SiLUActivation

from coati_ext.kernel.fp8_cast import grid_of_scales
from coati_ext.kernel.grouped_gemm import grouped_mm
from coati_ext.kernel.row_groups import RowGroups
from coati_ext.moe.dispatch import GatherRows, OwnRows, Permute, SumRows, combine, dispatch, plan_dispatch
from coati_ext.moe.frozen_weights import Fp8Weight, FrozenProduct, FrozenWeight, PackedWeight
from coati_ext.moe.lora_experts import lora_experts
from coati_ext.utils.kept_dtypes import FP8, SCALE_SUFFIX, KeepsFp8, fp8_parameters

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

# What transformers' `use_experts_implementation` sets on an experts module, and the one value that is built here.
_BUILT_LAYOUT = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}


def is_experts_module(module: nn.Module) -> bool:
    """Whether this is a stacked-experts module of transformers 5 (of whatever layout), or `MoeExperts`."""
    if isinstance(module, nn.ParameterDict):  # the factors of LoRA bear the same names
        return False
    stacked = [getattr(module, name, None) for name in ("gate_up_proj", "up_proj")]
    down = getattr(module, "down_proj", None)
    return any(
        isinstance(weight, nn.Parameter) and weight.dim() == 3 and isinstance(down, nn.Parameter) and down.dim() == 3
        for weight in stacked
    )


def shard_experts(model: nn.Module, ep_group: dist.ProcessGroup | None = None) -> None:
    """Put `MoeExperts` with this rank's experts in place of every experts module; twice does no harm.

    Raises:
        ValueError: the layout of the experts is not supported, or EP does not divide them.
    """
    for path, module in list(model.named_modules()):
        if is_experts_module(module) and not isinstance(module, MoeExperts):
            model.set_submodule(path, MoeExperts(module, ep_group=ep_group, name=path))


class MoeExperts(KeepsFp8):
    """This rank's experts, with LoRA on any of gate, up and down.

    Attributes:
        gate_up_proj, down_proj: (L, 2I, H) and (L, H, I); frozen under LoRA. FP8 after `keep_fp8`, with their scales
            beside them.
        lora_A, lora_B: `nn.ParameterDict` by projection: gate_proj and up_proj (L, r, H) and (L, I, r), down_proj
            (L, r, I) and (L, H, r). Empty without LoRA.
        num_experts, num_local_experts, first_expert: E, L, and the model-wide number of local expert 0.
        fp8_compute: whether forward products with FP8 weights are of rows in FP8 too.
        tokens_per_expert_E: routed rows that this rank sent to each expert of the model since the last reset.
    """

    def __init__(self, experts: nn.Module, *, ep_group: dist.ProcessGroup | None = None, name: str = "experts"):
        """Take over a transformers experts module, keeping only this rank's slice of its weights.

        Raises:
            ValueError: the layout of the experts is not supported, or EP does not divide them.
        """
        super().__init__()
        for attribute, built in _BUILT_LAYOUT.items():
            found = getattr(experts, attribute, built)
            if found != built:
                raise ValueError(
                    f"{name} ({type(experts).__name__}) has {attribute}={found}; supported is {attribute}={built}. "
                    "Experts with bias, transposed, interleaved or ungated weights (gpt-oss, aria, nemotron-h) are not."
                )
        if not hasattr(experts, "_apply_gate"):
            raise ValueError(f"{name} ({type(experts).__name__}) is no transformers 5 experts module: no _apply_gate")
        self.ep_group = ep_group
        ep_size, ep_rank = (dist.get_world_size(ep_group), dist.get_rank(ep_group)) if ep_group is not None else (1, 0)
        self.num_experts = experts.gate_up_proj.shape[0]
        if self.num_experts % ep_size:
            raise ValueError(f"{name} has {self.num_experts} experts, which ep_size={ep_size} does not divide")
        self.num_local_experts = self.num_experts // ep_size
        self.first_expert = ep_rank * self.num_local_experts
        local = slice(self.first_expert, self.first_expert + self.num_local_experts)
        for weight in ("gate_up_proj", "down_proj"):
            parameter = getattr(experts, weight)  # stays the object that an optimizer may know
            if ep_size > 1:
                parameter.data = parameter.data[local].clone()  # a view would keep all experts alive
            setattr(self, weight, parameter)
            delattr(experts, weight)
        self._gate = [
            experts
        ]  # what is left of the module: activation, limits and its own _apply_gate; not a submodule
        # act_fn(gate) * up, the gate that transformers gives to a module without one of its own, and its act_fn.
        own_gate = type(experts)._apply_gate.__module__ != "transformers.integrations.moe"
        self._is_swiglu = not own_gate and isinstance(getattr(experts, "act_fn", None), nn.SiLU | SiLUActivation)
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()
        self.rank, self.scaling, self.dropout = 0, 0.0, 0.0
        self.adapters_enabled = True
        self.fp8_compute = False
        self._packed: dict[str, PackedWeight] = {}
        self._dtype_before_fp8: torch.dtype | None = None
        device = self.gate_up_proj.device
        counts = torch.zeros(self.num_experts, dtype=torch.int64, device=device)
        self.register_buffer("tokens_per_expert_E", counts, persistent=False)
        self.train(experts.training)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of the rows and of LoRA's factors."""
        return self._dtype_before_fp8 or self.gate_up_proj.dtype

    def features(self, projection: str) -> tuple[int, int]:
        """(in, out) of one expert's projection."""
        hidden, intermediate = self.down_proj.shape[1:]
        return (intermediate, hidden) if projection == "down_proj" else (hidden, intermediate)

    def keep_fp8(self, name: str) -> None:
        """Make room for gate_up_proj or down_proj, frozen, as e4m3 with the scales of 128 x 128 blocks (fp32)."""
        weight = getattr(self, name)
        parts = weight.unflatten(1, (self._num_parts(name), -1))
        down, across = grid_of_scales(parts.shape)
        values, scales = fp8_parameters(weight, (len(weight), parts.shape[1] * down, across))
        self._dtype_before_fp8 = weight.dtype
        setattr(self, name, values)
        setattr(self, name + SCALE_SUFFIX, scales)

    @staticmethod
    def _num_parts(name: str) -> int:
        return 2 if name == "gate_up_proj" else 1

    def add_lora(self, projections: list[str], *, rank: int, scaling: float, dropout: float = 0.0) -> None:
        """Create `lora_A` and `lora_B` (zeros) for these projections; the caller initialises `lora_A`."""
        self.rank, self.scaling, self.dropout = rank, scaling, dropout
        for projection in projections:
            width_in, width_out = self.features(projection)
            like = {"dtype": self.compute_dtype, "device": self.gate_up_proj.device}
            self.lora_A[projection] = nn.Parameter(torch.zeros(self.num_local_experts, rank, width_in, **like))
            self.lora_B[projection] = nn.Parameter(torch.zeros(self.num_local_experts, width_out, rank, **like))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """(T, H) hidden, (T, K) chosen experts and their weights -> (T, H), as transformers' experts modules."""
        plan = plan_dispatch(top_k_index, self.num_experts, self.ep_group)
        if torch._C._current_graph_task_id() == -1:  # in a backward pass this is a recomputation, counted already
            self.tokens_per_expert_E += plan.rows.counts_E
        source_SH, weight_R = dispatch(hidden_states, top_k_weights, plan)
        experts = self._frozen_experts if self.parts_because(self.training) is None else self._experts
        return combine(experts(source_SH, weight_R, plan.own), plan)

    def parts_because(self, training: bool) -> str | None:
        """Why the experts go through autograd part by part, and not through `lora_experts`; None if they do not."""
        if not self._is_swiglu:
            return "their activation is not SwiGLU"
        if self.dropout > 0 and training and len(self.lora_A) > 0:
            return "their LoRA has dropout"
        if self.gate_up_proj.requires_grad or self.down_proj.requires_grad:
            return "their weights are trained"
        return None

    def pack(self) -> None:
        """Give frozen weights room for LoRA's factors before the first call, which would leave holes in the memory
        between its activations where the weights were. Each weight's old memory goes back to the GPU at once: what the
        next one took of it would keep the rest from being given back."""
        if len(self.lora_A) > 0 and self.parts_because(self.training) is None:
            for name in ("gate_up_proj", "down_proj"):
                self._frozen(name, self._ranks_of(name))
                torch.cuda.empty_cache()  # without a GPU it does nothing

    def _frozen_experts(self, source_SH: torch.Tensor, weight_R: torch.Tensor, own: OwnRows) -> torch.Tensor:
        lora_A, lora_B = (self.lora_A, self.lora_B) if self.adapters_enabled else ({}, {})
        return lora_experts(source_SH, weight_R, own, *self._frozen_weights(), lora_A, lora_B, self.scaling)

    def _frozen_weights(self) -> tuple[FrozenWeight, FrozenWeight]:
        gate_up, down = (self._frozen(name, self._ranks_of(name)) for name in ("gate_up_proj", "down_proj"))
        return gate_up, down

    def _ranks_of(self, name: str) -> dict[str, int]:
        projections = ("down_proj",) if name == "down_proj" else ("gate_proj", "up_proj")
        return {projection: self.rank for projection in projections if projection in self.lora_A}

    def _frozen(self, name: str, ranks: dict[str, int]) -> FrozenWeight:
        """The weight beside factors; a packed one is made anew where it was moved since."""
        parameter = getattr(self, name)
        if parameter.dtype == FP8:
            scales, parts = getattr(self, name + SCALE_SUFFIX), self._num_parts(name)
            return Fp8Weight(parameter, scales, parts, ranks, fp8_compute=self.fp8_compute)
        packed = self._packed.get(name)
        if packed is None or packed.ranks != ranks or not packed.holds(parameter):
            packed = self._packed[name] = PackedWeight(parameter, ranks)
        return packed

    def _product(self, rows: torch.Tensor, name: str, groups: RowGroups) -> torch.Tensor:
        """With gate_up_proj or down_proj, differentiable in it too unless it is FP8."""
        weight = getattr(self, name)
        if weight.dtype == FP8:
            return FrozenProduct.apply(rows, self._frozen(name, {}), groups)
        return grouped_mm(rows, weight.transpose(-2, -1), groups.offs_E)

    def _experts(self, source_SH: torch.Tensor, weight_R: torch.Tensor, own: OwnRows) -> torch.Tensor:
        """The same of differentiable parts."""
        groups = own.groups
        rows_RH = GatherRows.apply(source_SH, own.index_R, own.position_SK)
        gate_up = self._product(rows_RH, "gate_up_proj", groups)
        if self.adapters_enabled and "gate_proj" in self.lora_A:
            gate_up = gate_up + self._lora(rows_RH, ("gate_proj", "up_proj"), groups)
        act_RI = self._gate[0]._apply_gate(gate_up)
        weight_R1 = Permute.apply(weight_R.unsqueeze(1), own.order_R, own.position_SK.view(-1))
        act_RI = (act_RI * weight_R1).to(rows_RH.dtype)
        out_RH = self._product(act_RI, "down_proj", groups)
        if self.adapters_enabled and "down_proj" in self.lora_A:
            out_RH = out_RH + self._lora(act_RI, ("down_proj",), groups)
        return SumRows.apply(out_RH, own.index_R, own.position_SK)

    def _lora(self, x: torch.Tensor, projections: tuple[str, ...], groups: RowGroups) -> torch.Tensor:
        """scaling · x·A·B of projections that share their input, side by side: one thin product for all their A."""
        x = F.dropout(x, self.dropout, self.training)
        a = torch.cat([self.lora_A[projection] for projection in projections], dim=1).to(x.dtype)
        low = grouped_mm(x, a.transpose(-2, -1), groups.offs_E).split(self.rank, dim=-1)
        outs = [
            grouped_mm(part, self.lora_B[projection].to(x.dtype).transpose(-2, -1), groups.offs_E)
            for part, projection in zip(low, projections, strict=True)
        ]
        return self.scaling * torch.cat(outs, dim=-1)

    def extra_repr(self) -> str:
        last = self.first_expert + self.num_local_experts - 1
        lora = f"lora rank {self.rank} on {list(self.lora_A)}"
        return f"experts {self.first_expert}..{last} of {self.num_experts}, {self.gate_up_proj.dtype}, {lora}"
