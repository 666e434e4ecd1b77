"""From a config to a plugin: the one place that knows which plugin a `--plugin` means."""

from coati_ext.config import ParallelConfig, TrainConfig
from coati_ext.plugin.moe_lora import MoeLoraPlugin


def build_plugin(parallel: ParallelConfig, train: TrainConfig) -> MoeLoraPlugin:
    """The plugin of a run. `ParallelConfig` has refused every layout that is not built."""
    return MoeLoraPlugin(
        ep_size=parallel.ep,
        zero_stage=parallel.zero_stage,
        precision=train.mixed_precision,
        max_norm=train.grad_clip,
        cpu_offload=parallel.zero_cpu_offload,
    )
