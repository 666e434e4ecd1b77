"""ColossalAI plugins for LoRA on MoE models. Importing this mends colossalai first (see `coati_ext.compat`)."""

from coati_ext import compat

compat.apply()  # before anything of colossalai.booster is imported

from coati_ext.plugin.build import build_plugin  # noqa: E402 (after the mends)
from coati_ext.plugin.moe_lora import MoeLoraPlugin  # noqa: E402 (after the mends)

__all__ = ["MoeLoraPlugin", "build_plugin"]
