"""LoRA fine-tuning of mixture-of-experts models, GRPO and checkpoint tools on ColossalAI's Booster.

Importing this package loads nothing heavy: it only reads the installed packages' metadata, and raises an `ImportError`
of one line if torch, transformers, peft or colossalai is missing or outside the range that works.
"""

from coati_ext import versions

__version__ = versions.COATI_EXT

versions.check()
