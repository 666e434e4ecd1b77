"""The shardformer policy of decoders: what each rank holds of the model, by the model's own plans.

The work is `models.shard.shard_decoder`'s; a model that was sharded before (to stream its weights, or by `enable_lora`)
is left as it is.
"""

from collections.abc import Callable

from colossalai.shardformer.policies.base_policy import Policy
from torch import nn


class DecoderPolicy(Policy):
    """Any transformers 5 decoder, by its own structure rather than by class name.

    Args:
        shard: puts this rank's part in place of the whole model; does nothing the second time.
    """

    def __init__(self, shard: Callable[[nn.Module], None]):
        super().__init__()
        self._shard = shard

    def config_sanity_check(self) -> None:
        pass  # the plugin's constructor and `shard` refuse what cannot be run

    def preprocess(self) -> nn.Module:
        self._shard(self.model)
        return self.model

    def module_policy(self) -> dict:
        return {}

    def postprocess(self) -> nn.Module:
        return self.model

    def get_held_layers(self) -> list[nn.Module]:
        return [self.model]  # what is not held is gone already

    def get_shared_params(self) -> list[dict[int, nn.Parameter]]:
        """The trained tied embedding of a pipeline: on the first stage for lookup, on the last as the head."""
        stages, model = self.pipeline_stage_manager, self.model
        tied = getattr(model.config, "tie_word_embeddings", False)
        if stages is None or stages.num_stages == 1 or not tied or getattr(model, "lora_config", None) is not None:
            return []
        first, last = 0, stages.num_stages - 1
        module = {first: model.get_input_embeddings, last: model.get_output_embeddings}.get(stages.stage)
        weight = None if module is None else module().weight
        return [{first: weight, last: weight}]
