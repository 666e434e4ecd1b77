"""The experts layer of every MoE family: expert parallelism, grouped expert LoRA, load statistics."""

from coati_ext.moe.experts import MoeExperts, is_experts_module
from coati_ext.moe.load import expert_load, reset_expert_load

__all__ = ["MoeExperts", "expert_load", "is_experts_module", "reset_expert_load"]
