"""What a rank holds of a decoder: its pipeline stage, and of each layer its experts and slices of matrices.

Works on real weights and on the meta device, for any transformers 5 decoder: paths stay those of the whole model, and
the model's own forward stays in use. On a pipeline stage a `PassThrough` stands for every layer, embedding and norm of
the other stages, so that the forward of the whole model, given the hidden states of the stage before, computes what
this stage has to. That is right only for a model that does nothing to the hidden states outside these modules (a model
that scales its embeddings, say, would scale them again); `keep_stage` proves it by a forward without any of them.

Legend: B batch, S sequence, H hidden.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from coati_ext.models.targets import structure_of
from coati_ext.models.tensor_parallel import shard_tensor_parallel
from coati_ext.moe.experts import shard_experts

_PP_PLAN = ("embed_tokens", "layers", "norm")  # where a config class states none, as OLMoE's


class PassThrough(nn.Module):
    """Stands for a module of another pipeline stage: returns what it is given first."""

    def forward(self, hidden_BSH: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_BSH


def shard_decoder(
    model: nn.Module,
    *,
    ep_group: dist.ProcessGroup | None = None,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    layers_per_stage: tuple[int, ...] = (),
    stage: int = 0,
) -> None:
    """Keep this rank's part of a whole model, in place; a model that is sharded already is left as it is.

    Args:
        sequence_parallel: see `shard_tensor_parallel`.
        layers_per_stage: decoder layers of each pipeline stage; with one or none the model stays whole.

    Raises:
        ValueError: a layout that this model cannot have; names what is in conflict.
    """
    if getattr(model, "is_sharded", False):
        return
    structure = structure_of(model)
    ep_size = dist.get_world_size(ep_group) if ep_group is not None else 1
    if ep_size > 1 and structure.num_experts == 0:
        raise ValueError(
            f"ep_size={ep_size}, but {structure.class_name} is dense: it has no routed experts to spread. Use --ep 1."
        )
    if tp_group is not None:
        shard_tensor_parallel(model, tp_group, sequence_parallel=sequence_parallel)
    if len(layers_per_stage) > 1:
        keep_stage(model, layers_per_stage, stage)
    shard_experts(model, ep_group)
    model.is_sharded = True


def keep_stage(model: PreTrainedModel, layers_per_stage: tuple[int, ...], stage: int) -> None:
    """Leave the modules of this stage, by the model's own pipeline plan, and `PassThrough` for the others.

    Raises:
        ValueError: the model has not the modules of the plan, or computes outside of them.
    """
    base, last = model.base_model, len(layers_per_stage) - 1
    before, after = _plan(model)
    if sum(layers_per_stage) != len(base.layers):
        raise ValueError(f"layers_per_stage is {layers_per_stage}, but the model has {len(base.layers)} layers")
    _check_nothing_else_computes(model, (*before, *after))
    start = sum(layers_per_stage[:stage])
    for index in range(len(base.layers)):
        if not start <= index < start + layers_per_stage[stage]:
            base.layers[index] = PassThrough()
    for name in before if stage > 0 else ():
        setattr(base, name, PassThrough())
    if stage < last:
        for name in after:
            setattr(base, name, PassThrough())
        for name in getattr(model, "_pp_plan", None) or ("lm_head",):
            setattr(model, name, PassThrough())


def stage_forward(
    model: PreTrainedModel,
    *,
    is_first: bool,
    is_last: bool,
    hidden_states: torch.Tensor | None = None,
    with_head: bool = True,
    **batch: Any,
) -> Any:
    """This stage's part of `model(**batch)`: {"hidden_states": (B, S, H)} for the next one, or the model's output.

    Args:
        hidden_states: of the stage before; None on the first.
        with_head: false: the last stage too returns hidden states, which its head would make logits of.
        batch: input_ids (B, S), attention_mask or position_ids, the same on every stage; what
            supervises is left aside.
    """
    for supervision in ("labels", "targets"):
        batch.pop(supervision, None)
    if not is_first:
        del batch["input_ids"]
        batch["inputs_embeds"] = hidden_states
    if is_last and with_head:
        return model(**batch)
    return {"hidden_states": model.base_model(**batch).last_hidden_state}


def _plan(model: PreTrainedModel) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the base model's modules before and after its layers."""
    names = tuple(getattr(model.config.get_text_config(), "base_model_pp_plan", None) or _PP_PLAN)
    absent = [name for name in names if not isinstance(getattr(model.base_model, name, None), nn.Module)]
    if absent or "layers" not in names:
        raise ValueError(
            f"pipeline: {type(model.base_model).__name__} has no {absent[0] if absent else 'layers'} where a plan of "
            "stages expects it; use pp=1"
        )
    middle = names.index("layers")
    return names[:middle], names[middle + 1 :]


@torch.no_grad()
def _check_nothing_else_computes(model: PreTrainedModel, others: tuple[str, ...]) -> None:
    base = model.base_model
    planned = {name: base.get_submodule(name) for name in ("layers", *others)}
    beside = [n for n, _ in base.named_parameters() if n.partition(".")[0] not in {"layers", *others}]
    if beside:
        raise ValueError(f"pipeline: {beside[0]} of {type(base).__name__} is on no stage by its plan; use pp=1")
    device = next((b.device for b in base.buffers() if not b.is_meta), torch.device("cpu"))
    probe_BSH = torch.linspace(-1, 1, 2 * model.config.get_text_config().hidden_size, device=device).view(1, 2, -1)
    try:
        for name in others:
            setattr(base, name, PassThrough())
        base.layers = nn.ModuleList(PassThrough() for _ in planned["layers"])
        out_BSH = base(inputs_embeds=probe_BSH).last_hidden_state
    except (TypeError, ValueError, AttributeError, RuntimeError):  # its layers give more than hidden states
        out_BSH = torch.empty(0)
    finally:
        for name, module in planned.items():
            setattr(base, name, module)
    if not torch.equal(out_BSH, probe_BSH):
        raise ValueError(
            f"pipeline: {type(base).__name__} does more with its hidden states than to pass them from the embedding "
            "through its layers to the norm, so it cannot be cut into stages; use pp=1"
        )
