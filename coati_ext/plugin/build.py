"""From a config to a plugin: the one place that knows which plugin a `--plugin` means."""

from typing import TYPE_CHECKING, Any

from coati_ext.config import OptimConfig, ParallelConfig
from coati_ext.plugin.moe_lora import MoeLoraPlugin

if TYPE_CHECKING:
    from coati_ext.plugin.gemini import FullGeminiPlugin

# Of the data-parallel plugins: what colossalai's plugin of that name does, as arguments of ours.
_DATA_PARALLEL: dict[str, dict[str, Any]] = {
    "ddp": {"zero_stage": 0},
    "zero2": {"zero_stage": 2},
    "zero2_cpu": {"zero_stage": 2, "cpu_offload": True},
}


def build_plugin(
    parallel: ParallelConfig, train: OptimConfig, *, accumulates: bool = False
) -> "MoeLoraPlugin | FullGeminiPlugin":
    """The plugin of a run. `ParallelConfig` has refused every layout that is not built."""
    if parallel.plugin.startswith("gemini"):
        from coati_ext.plugin.gemini import FullGeminiPlugin

        return FullGeminiPlugin(
            precision=train.mixed_precision,
            placement_policy="auto" if parallel.plugin == "gemini_auto" else "static",
            max_norm=train.grad_clip,
            accumulates=accumulates,
        )
    settings = _DATA_PARALLEL.get(parallel.plugin)
    if settings is None:
        settings = {
            "tp_size": parallel.tp,
            "ep_size": parallel.ep,
            "pp_size": parallel.pp,
            "sp_size": parallel.sp,
            "zero_stage": parallel.zero_stage,
            "cpu_offload": parallel.zero_cpu_offload,
            "num_layers_per_stage": parallel.num_layers_per_stage,
            "enable_sequence_parallelism": parallel.enable_sequence_parallelism,
            "sequence_parallelism_mode": parallel.sp_mode,
        }
    elif parallel.zero_cpu_offload:
        settings = {**settings, "cpu_offload": True}
    return MoeLoraPlugin(precision=train.mixed_precision, max_norm=train.grad_clip, **settings)
