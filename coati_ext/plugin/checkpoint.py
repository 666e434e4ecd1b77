"""Booster's checkpoint IO for decoders: models and adapters that load elsewhere, states that any layout reads."""

from typing import Any

import torch.distributed as dist
from colossalai.checkpoint_io import MoECheckpointIO
from colossalai.interface import ModelWrapper, OptimizerWrapper
from torch import nn

from coati_ext.checkpoint_io.adapter import save_adapter
from coati_ext.checkpoint_io.layout import Layout
from coati_ext.checkpoint_io.save_model import save_model
from coati_ext.checkpoint_io.training_state import agree_on_training_state, save_training_state


class MoeLoraCheckpointIO(MoECheckpointIO):
    """Models and adapters become Hugging Face directories, optimizers training states.

    Upstream's skips experts of an adapter or crashes when a rank holds none, and its optimizer files fail for MoE.
    """

    def __init__(self, *groups: Any, ep_group: dist.ProcessGroup, layout: Layout, layout_rank: int):
        super().__init__(*groups)
        self._ep_group, self._layout, self._layout_rank = ep_group, layout, layout_rank

    def load_model(self, model: ModelWrapper, checkpoint: str, *_: Any, **__: Any) -> ModelWrapper:
        """Refused: upstream's would leave experts and slices as they are.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"load_model: start from {checkpoint} instead: from_pretrained, or build_meta_model, plugin.shard and "
            "load_weights (coati_ext.checkpoint_io.load), before boost"
        )

    def save_model(self, model: ModelWrapper, checkpoint: str, *_: Any, **kwargs: Any) -> None:
        """Write all weights under the names of the checkpoint that the model came from; every rank must call it.

        Args:
            checkpoint: a directory; the other arguments of upstream's have no effect: it is sharded safetensors.
            kwargs: `dtype`, `tokenizer`, `show_progress` and `card`, as of `checkpoint_io.save_model.save_model`.
        """
        inner = _unwrapped(model, "save_model")
        wanted = {name: kwargs[name] for name in ("dtype", "tokenizer", "show_progress", "card") if name in kwargs}
        save_model(
            inner,
            checkpoint,
            pretrained=inner.name_or_path,
            layout=self._layout,
            rank=self._layout_rank,
            group=dist.group.WORLD,
            **wanted,
        )

    def save_optimizer(self, optimizer: OptimizerWrapper, checkpoint: str, *_: Any, **__: Any) -> None:
        """Write the fp32 parameters and states that each rank holds, as a training state; every rank must call it."""
        save_training_state(
            checkpoint,
            0,
            pieces=optimizer.state_pieces(),
            rank_state={},
            shared_state=optimizer.shared_state(),
            keep_last=1,
            group=dist.group.WORLD,
        )

    def load_optimizer(self, optimizer: OptimizerWrapper, checkpoint: str, *_: Any, **__: Any) -> None:
        """Take up what `save_optimizer` wrote, under this or another layout; the parameters become the saved ones.

        Raises:
            ValueError: there is none, or it is of another model or adapter.
        """
        saved = agree_on_training_state(checkpoint, dist.group.WORLD)
        if saved is None:
            raise ValueError(f"load_optimizer: {checkpoint} has no state that save_optimizer wrote")
        optimizer.load_state(saved)

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
        inner = _unwrapped(model, "save_lora_as_pretrained")
        kwargs.setdefault("base_model_name_or_path", inner.name_or_path or None)
        pp_group = self.pp_group if dist.get_world_size(self.pp_group) > 1 else None
        is_writer = dist.get_rank() == 0  # the first rank of ColossalAI's mesh: stage 0, EP rank 0
        is_first = all(dist.get_rank(group) == 0 for group in (self._ep_group, self.tp_group))
        save_adapter(
            inner,
            checkpoint,
            is_writer=is_writer,
            is_first=is_first,
            group=dist.group.WORLD,
            pp_group=pp_group,
            **kwargs,
        )


def _unwrapped(model: ModelWrapper, caller: str) -> nn.Module:
    if not isinstance(model, ModelWrapper):
        raise ValueError(f"{caller}: boost the model first")
    return model.unwrap(unwrap_peft=False)
