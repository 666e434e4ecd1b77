"""The shardformer policy of decoders: what each rank holds of the model.

Expert sharding is not a policy's work here: `inject_lora` does it when it puts the experts layer in. Without pipeline
and tensor parallelism a decoder is left as it is.
"""

from colossalai.shardformer.policies.base_policy import Policy
from torch import nn


class DecoderPolicy(Policy):
    """Any transformers 5 decoder, by its own structure rather than by class name."""

    def config_sanity_check(self) -> None:
        if self.pipeline_stage_manager is not None or self.shard_config.enable_tensor_parallelism:
            raise ValueError(
                "DecoderPolicy: pipeline and tensor parallelism are not built yet; use tp_size=1, pp_size=1"
            )

    def preprocess(self) -> nn.Module:
        return self.model

    def module_policy(self) -> dict:
        return {}

    def postprocess(self) -> nn.Module:
        return self.model
