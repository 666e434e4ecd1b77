"""ZeRO 0, 1 and 2 over the two gradient groups of a MoE model, with the gradient norm that one process would see.

colossalai 0.5.0 adds the norms of the dense and the expert parameters (not their squares) and never sums the experts'
over the EP group, so that ranks clip the same dense parameters by different factors (zero/low_level/
low_level_optim.py, `step`). Under fp16 it also reports the norm still multiplied by the loss scale. Its MoE optimizer
refuses a rank without experts (booster/plugin/moe_hybrid_parallel_plugin.py), as the first stages of a pipeline can be.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from colossalai.booster.plugin.hybrid_parallel_plugin import HybridParallelZeroOptimizer
from colossalai.tensor.moe_tensor.api import is_moe_tensor
from torch import nn
from torch.optim import Optimizer

from coati_ext.checkpoint_io.training_state import Piece, TrainingState
from coati_ext.plugin.optimizer_state import kinds_of, pieces_of, put_piece, wanted_pieces

NO_ADAPTER = "no_adapter_on_this_stage"
_REDUCED_AT_ONCE = 25_000_000  # gradient elements of one all-reduce under stage 0


class DecoderZeroOptimizer(HybridParallelZeroOptimizer):
    """Expert parameters are reduced over the MoE-DP group, all others over the DP group.

    Stage 0 is stage 1 over `alone`, a group of this rank only: it holds all states, and gradients are averaged before.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        zero_stage: int,
        dp_process_group: dist.ProcessGroup,
        moe_dp_group: dist.ProcessGroup,
        alone: dist.ProcessGroup,
        **kwargs: Any,
    ):
        self._zero_stage = zero_stage
        self._reduced_over = {False: dp_process_group, True: moe_dp_group}  # by whether it is a parameter of experts
        parameters = list(model.parameters())
        if zero_stage == 0:
            groups = {alone: parameters}
        elif dp_process_group is moe_dp_group:
            groups = {dp_process_group: parameters}
        else:
            groups = {
                dp_process_group: [p for p in parameters if not is_moe_tensor(p)],
                moe_dp_group: [p for p in parameters if is_moe_tensor(p)],
            }
        # use_pipeline: the optimizer keeps only the parameters that this rank holds
        super().__init__(optimizer, model, use_pipeline=True, pg_to_param_list=groups, **kwargs)

    def get_grad_norm(self, norm_type: int = 2, **kwargs: Any) -> float | None:
        """L2 norm of the last step's gradient over all trainable parameters of the model, before clipping."""
        if norm_type != 2:
            raise ValueError(f"get_grad_norm: only the L2 norm is kept, got norm_type={norm_type}")
        return self._current_grad_norm

    def step(self, closure: None = None) -> None:
        """As upstream's. When fp16 overflows the step is skipped, and `get_grad_norm` is None until the next.

        Raises:
            FloatingPointError: the gradient norm is not finite, or fp16 overflows at the lowest loss scale (on every
                rank alike); nothing was updated.
        """
        self._current_grad_norm = None
        self._loss_scale = self.loss_scale or 1.0  # `step` may raise it first
        try:
            super().step(closure)
        except FloatingPointError:
            for group_id, masters in self._master_param_groups_of_current_rank.items():
                self.optim.param_groups[group_id]["params"] = masters
                for master in masters:
                    master.grad = None
            raise
        overflowed = self._scaler is not None and self.require_grad_sync and self._current_grad_norm is None
        if overflowed and self._scaler._min_scale is not None and self._loss_scale <= self._scaler._min_scale.item():
            raise FloatingPointError(f"the fp16 gradients overflow at loss scale {self._loss_scale:g}, the lowest")

    @property
    def loss_scale(self) -> float | None:
        """fp16's; None in other precisions."""
        return None if self._scaler is None else self._scaler.scale.item()

    def state_pieces(self) -> dict[Piece, torch.Tensor]:
        """fp32 parameters and states of the optimizer that this rank holds; what several hold, on one of them."""
        pieces: dict[Piece, torch.Tensor] = {}
        shard_kinds, scalar_kinds = kinds_of(self.optim.state)
        for name, param in self._named_working_params():
            if self._is_first_holder(param):
                master = self.working_to_master_param[id(param)]
                state = self.optim.state.get(master, {})
                if not state:  # it never had a gradient: what the optimizer would begin with
                    state = {kind: torch.zeros_like(master.data) for kind in shard_kinds}
                    state |= {kind: 0.0 for kind in scalar_kinds}
                pieces.update(pieces_of(name, param, master, state, shard=self._shard(param)))
        return pieces

    def shared_state(self) -> dict[str, Any]:
        """JSON that is alike on all ranks: the names of the states, and fp16's loss scale."""
        shared: dict[str, Any] = {"optimizer_states": kinds_of(self.optim.state), "loss_scale": None}
        scaler = self._scaler
        if scaler is not None:
            shared["loss_scale"] = [scaler.scale.item(), scaler._growth_step, scaler._hysteresis_step]
        kinds: list = [None] * dist.get_world_size()
        dist.all_gather_object(kinds, shared["optimizer_states"])  # a stage without an adapter has none
        shared["optimizer_states"] = [list(dict.fromkeys(k for rank in kinds for k in rank[i])) for i in (0, 1)]
        return shared

    def load_state(self, saved: TrainingState) -> None:
        """Take up what `state_pieces` and `shared_state` gave, under this or another layout.

        Raises:
            ValueError: the saved state is of another adapter or model; names the tensor.
        """
        kinds = saved.shared_state["optimizer_states"]
        wanted = {}
        for name, param in self._named_working_params():
            master, shard = self.working_to_master_param[id(param)], self._shard(param)
            wanted |= {
                piece: (param, master, shard) for piece in wanted_pieces(name, param, master, kinds, shard=shard)
            }
        states: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for piece, tensor in saved.read(wanted, rank=dist.get_rank()):
            param, master, shard = wanted[piece]
            put_piece(piece, tensor, param, master, states.setdefault(master, {}), shard=shard)
        if any(group.get("fused") for group in self.optim.param_groups):  # which counts steps on the device
            for master, state in states.items():
                state |= {kind: value.to(master.device) for kind, value in state.items() if value.dim() == 0}
        self.optim.state.update(states)
        scaler = self._scaler
        if scaler is not None and saved.shared_state["loss_scale"] is not None:
            scale, scaler._growth_step, scaler._hysteresis_step = saved.shared_state["loss_scale"]
            scaler._scale.fill_(scale)

    @property
    def _scaler(self) -> Any:
        """fp16's loss scaler; None in other precisions."""
        return getattr(self.mixed_precision_mixin, "grad_scaler", None)

    def _named_working_params(self) -> Iterator[tuple[str, nn.Parameter]]:
        working, model = {id(param) for param in self._working_params()}, self.model.unwrap(unwrap_peft=False)
        tied = getattr(model.config, "tie_word_embeddings", False) and getattr(model, "_tied_weights_keys", None)
        for name, param in model.named_parameters():
            if id(param) in working and name != NO_ADAPTER:
                yield tied.get(name, name) if isinstance(tied, dict) else name, param  # alike on all stages

    def _shard(self, param: nn.Parameter) -> int:
        return dist.get_rank(self.param_to_pg[param])

    def _is_first_holder(self, param: nn.Parameter) -> bool:
        of_data = self._zero_stage > 0 or dist.get_rank(self._reduced_over[is_moe_tensor(param)]) == 0
        return of_data and (hasattr(param, "tp_cut") or dist.get_rank(self.tp_pg) == 0)

    def sync_dp_grads(self) -> None:
        self._sync_grad()

    def _sync_grad(self) -> None:
        if self._zero_stage == 0:
            for is_moe, group in self._reduced_over.items():
                _average([p for p in self._working_params() if is_moe_tensor(p) == is_moe], group)
        super()._sync_grad()

    def _working_params(self) -> Iterator[nn.Parameter]:
        for params in self._working_param_groups.values():
            yield from params

    def _compute_grad_norm(self, dp_pg: Any, gradients: list[torch.Tensor], norm_type: int = 2) -> float:
        return 0.0  # per store upstream, which cannot be added up; see _unscale_and_clip_grads

    def _unscale_and_clip_grads(self, grad_groups_flat: list[torch.Tensor], total_norm: float) -> None:
        scale = self._loss_scale
        norm = self._global_norm(grad_groups_flat) / scale
        self._current_grad_norm = norm
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient norm is {norm}")
        if self._clip_grad_norm > 0 and norm > self._clip_grad_norm:
            scale *= (norm + 1e-6) / self._clip_grad_norm
        if scale != 1 and grad_groups_flat:
            torch._foreach_mul_(grad_groups_flat, 1 / scale)

    def _global_norm(self, shards: list[torch.Tensor]) -> float:
        """Over all ranks; a gradient that several hold counts once."""
        square = torch.zeros((), dtype=torch.float64, device=next(self.model.parameters()).device)
        copies = [self._num_copies(param) for param in self._params_with_gradient()]
        if shards:  # all tensors at once: hundreds of them, each a few kernels, took longer than the update
            norms = torch.stack(torch._foreach_norm(shards, 2, dtype=torch.float64))
            square += (norms.square() / norms.new_tensor(copies)).sum().to(square.device)
        dist.all_reduce(square)
        return square.sqrt().item()

    def _params_with_gradient(self) -> Iterator[nn.Parameter]:
        """In the order of upstream's `step`."""
        for group_id, params in self._working_param_groups.items():
            for param in params:
                store = self.pid_to_grad_store[id(param)]
                if store.get_partitioned_gradients_by_param_id(group_id, id(param)):
                    yield param

    def _num_copies(self, param: nn.Parameter) -> int:
        """Ranks that hold the same shard of this parameter's gradient."""
        copies = dist.get_world_size(self._reduced_over[is_moe_tensor(param)]) if self._zero_stage == 0 else 1
        if not hasattr(param, "tp_cut"):
            copies *= dist.get_world_size(self.tp_pg)
        for shared in self.shared_params:
            if shared.get(self.stage_manager.stage) is param:
                copies *= len(shared)
        return copies


def _average(params: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Mean of the gradients over the group, in place."""
    size = dist.get_world_size(group)
    grads = [p.grad for p in params if p.grad is not None]
    while size > 1 and grads:
        count, num_elements = 0, 0
        while count < len(grads) and (count == 0 or num_elements + grads[count].numel() <= _REDUCED_AT_ONCE):
            num_elements += grads[count].numel()
            count += 1
        bucket, grads = grads[:count], grads[count:]
        flat = torch.cat([grad.reshape(-1) for grad in bucket]).div_(size)
        dist.all_reduce(flat, group=group)
        for grad, mean in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
            grad.copy_(mean.view_as(grad))
