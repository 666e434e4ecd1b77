"""ZeRO-1 over the two gradient groups of a MoE model, with the gradient norm that one process would see.

colossalai 0.5.0 adds the norms of the dense and the expert parameters (not their squares) and never sums the experts'
over the EP group, so that ranks clip the same dense parameters by different factors (zero/low_level/
low_level_optim.py, `step`). Under fp16 it also reports the norm still multiplied by the loss scale.
"""

import torch
import torch.distributed as dist
from colossalai.booster.plugin.moe_hybrid_parallel_plugin import MoeHybridParallelZeroOptimizer


class MoeLoraZeroOptimizer(MoeHybridParallelZeroOptimizer):
    """Expert parameters are reduced over the MoE-DP group, all others over the DP group; each rank keeps its shards."""

    def __init__(self, *args, dp_process_group: dist.ProcessGroup, **kwargs):
        super().__init__(*args, dp_process_group=dp_process_group, **kwargs)
        self._norm_group = dp_process_group

    def get_grad_norm(self, norm_type: int = 2, **kwargs) -> float | None:
        """L2 norm of the last step's gradient over all trainable parameters of the model, before clipping."""
        if norm_type != 2:
            raise ValueError(f"get_grad_norm: only the L2 norm is kept, got norm_type={norm_type}")
        return self._current_grad_norm

    def step(self, closure=None) -> None:
        """As upstream's. When fp16 overflows the step is skipped, and `get_grad_norm` is None until the next."""
        self._current_grad_norm = None
        super().step(closure)

    def _compute_grad_norm(self, dp_pg, gradients, norm_type=2) -> float:
        return 0.0  # per store upstream, which cannot be added up; see _unscale_and_clip_grads

    def _unscale_and_clip_grads(self, grad_groups_flat: list[torch.Tensor], total_norm: float) -> None:
        scale = self.mixed_precision_mixin.get_grad_div_scale() if self.mixed_precision_mixin is not None else 1.0
        norm = self._global_norm(grad_groups_flat) / scale
        self._current_grad_norm = norm
        if self._clip_grad_norm > 0 and norm > self._clip_grad_norm:
            scale *= (norm + 1e-6) / self._clip_grad_norm
        for grad in grad_groups_flat:
            grad.data.mul_(1 / scale)

    def _global_norm(self, shards: list[torch.Tensor]) -> float:
        """Every element of every gradient lies in exactly one shard of the DP group (= EP x MoE-DP)."""
        square = sum((shard.double().square().sum() for shard in shards), torch.zeros((), dtype=torch.float64))
        square = square.to(self._working_device())
        dist.all_reduce(square, group=self._norm_group)
        return square.sqrt().item()

    def _working_device(self) -> torch.device:
        return next(p.device for params in self.pg_to_param_list.values() for p in params)
