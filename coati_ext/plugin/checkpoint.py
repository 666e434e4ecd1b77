"""Booster's checkpoint IO for LoRA on MoE models: `save_lora_as_pretrained` writes a PEFT adapter that loads."""

import torch.distributed as dist
from colossalai.checkpoint_io import MoECheckpointIO
from colossalai.interface import ModelWrapper

from coati_ext.checkpoint_io.adapter import save_adapter


class MoeLoraCheckpointIO(MoECheckpointIO):
    """Only the LoRA part differs from upstream's, which skips experts or crashes when a rank holds none."""

    def save_lora_as_pretrained(
        self,
        model: ModelWrapper,
        checkpoint: str,
        use_safetensors: bool = True,
        state_dict: dict | None = None,
        **kwargs,
    ) -> None:
        """Gather the experts' tensors and write the adapter directory from rank 0; every rank must call it.

        Args:
            checkpoint: the directory to write.
            use_safetensors: ignored, an adapter is always safetensors.
            kwargs: passed to `coati_ext.checkpoint_io.adapter.save_adapter` (tokenizer, card, dtype). The base
                model's name in it is where the model was loaded from.
        """
        if state_dict is not None:
            raise ValueError("save_lora_as_pretrained: state_dict is not supported; the adapter is read from the model")
        if not isinstance(model, ModelWrapper):
            raise ValueError("save_lora_as_pretrained: boost the model first")
        inner = model.unwrap(unwrap_peft=False)
        kwargs.setdefault("base_model_name_or_path", inner.name_or_path or None)
        pp_group = self.pp_group if dist.get_world_size(self.pp_group) > 1 else None
        is_writer = dist.get_rank() == 0  # the first rank of ColossalAI's mesh: stage 0, EP rank 0
        save_adapter(inner, checkpoint, is_writer=is_writer, group=dist.group.WORLD, pp_group=pp_group, **kwargs)
