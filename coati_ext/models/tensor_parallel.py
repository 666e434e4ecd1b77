"""Tensor parallelism of a decoder: every rank holds a slice of its matrices, by the model's own `base_model_tp_plan`.

The slices are those of `coati_ext.checkpoint_io.reshard`: matrices by rows ("colwise") or columns ("rowwise") in equal
parts, embedding and head by vocabulary, everything else whole. Logits come out whole on every rank. transformers' own
tensor parallelism is not used: it makes DTensors, refuses uneven vocabularies, and puts its communication inside PEFT's
LoRA layer instead of around it.

Sequence parallelism (Korthikanti et al. 2022, section 4.2.2) also shares the work between the matrices: the hidden
states between the blocks are cut along the sequence. With it the hidden states that a decoder layer returns are this
rank's part; those after the last norm are whole.

Dropout: the ranks of a group must draw from equal RNG states. They then drop what one process would.

Left out: routed experts (expert parallelism is for these), tp above the number of key-value heads.
"""

import re
from typing import Any

import torch
import torch.distributed as dist
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn

from coati_ext.models.collectives import copy, gather, gather_sum, share, split
from coati_ext.models.targets import structure_of
from coati_ext.models.tensor_parallel_layers import (
    Style,
    TensorParallelLinear,
    VocabParallelEmbedding,
    mark_cuts,
    sum_gradients,
)
from coati_ext.moe.experts import MoeExperts, is_experts_module

# transformers' styles (distributed/tensor_parallel.py) of linears
STYLES = {
    "colwise": Style(dim=0),
    "colwise_rep": Style(dim=0, whole=True),
    "colwise_gather_output": Style(dim=0, whole=True),
    "rowwise": Style(dim=1),
    "rowwise_rep": Style(dim=1, whole=True),
    "rowwise_split_input": Style(dim=1, whole=True),
    "mla_kv_a_proj": Style(dim=None),
}
_PARTIAL_GRADIENT = "replicated_with_grad_allreduce"  # the style of whole modules that work on this rank's heads
_VOCABULARY = ("embed_tokens", "lm_head")  # cut by vocabulary, whatever the plan says
# Projections that are cut between heads -> the number that tp must divide
_HEADS_OF = dict.fromkeys(("q_proj", "q_b_proj", "kv_b_proj", "o_proj"), "num_attention_heads")
_HEADS_OF |= dict.fromkeys(("k_proj", "v_proj"), "num_key_value_heads")
# Of multi-head latent attention: before the heads, so whole on every rank though the plan is silent about them
_BEFORE_HEADS = {"q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"}


class SequenceShards:
    """How long the sequence of the current forward is; a rank's part of it does not tell."""

    length = 0


def shard_tensor_parallel(model: nn.Module, tp_group: dist.ProcessGroup, *, sequence_parallel: bool = False) -> None:
    """Keep this rank's slices of the model's matrices and put the communication in; in place, before `inject_lora`.

    Args:
        model: a whole transformers 5 decoder, the same on all ranks of the group; its weights may be on the meta
            device. Where loading replaces parameters afterwards, call `mark_cuts` again.
        sequence_parallel: also cut the hidden states between the blocks along the sequence. It may have any length.

    Raises:
        ValueError: names what this model or this size of the group does not allow; nothing is changed then.
    """
    tp_size = dist.get_world_size(tp_group)
    if tp_size == 1:
        return
    structure_of(model)  # of the whole, before it is cut
    base = model.base_model
    styles = _planned(model, base)
    _check_sizes(base, styles, tp_size)
    _check_vocabulary(model, tp_size)
    blocks = _blocks(base, styles)
    if sequence_parallel:
        _check_sequence_parallel(base, blocks)
    sequence = SequenceShards() if sequence_parallel else None
    for block, linears in blocks.items():
        one_input = _one_input(base.get_submodule(block), linears)
        for path, style in linears.items():
            sharded = TensorParallelLinear(
                base.get_submodule(path),
                style,
                tp_group,
                copies=not one_input,
                cuts_sequence=sequence_parallel,
                tail=base.config.qk_rope_head_dim if style.dim is None else 0,
            )
            base.set_submodule(path, sharded)
        if one_input or sequence_parallel:
            _open_block(base.get_submodule(block), tp_group, sequence, one_input)
    for path in (path for path, style in styles.items() if style == _PARTIAL_GRADIENT):
        sum_gradients(base.get_submodule(path), tp_group)
    _shard_vocabulary(model, tp_group)
    if sequence is not None:
        _shard_sequence(base, sequence, tp_group)
    mark_cuts(model)


def _planned(model: nn.Module, base: nn.Module) -> dict[str, str]:
    """Path in the base model -> style, of the modules that the plan names."""
    name, kinds = type(model).__name__, (TensorParallelLinear, VocabParallelEmbedding, LoraLinear, MoeExperts)
    for path, module in model.named_modules():
        if isinstance(module, kinds):
            raise ValueError(f"shard_tensor_parallel comes once, before LoRA; {path} is a {type(module).__name__}")
        if is_experts_module(module):
            raise ValueError(f"{path}: tensor parallelism of routed experts is not built; use ep to share {name}")
    plan = getattr(base.config, "base_model_tp_plan", None)
    if not plan:
        raise ValueError(f"transformers has no base_model_tp_plan for {base.config.model_type!r}; use tp=1")
    styles = {}
    for path, module in base.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path))
        if style is None or path in _VOCABULARY:
            continue
        if style not in STYLES and style != _PARTIAL_GRADIENT:
            raise ValueError(f"{path} is to be shared as {style!r}; supported are {[*STYLES, _PARTIAL_GRADIENT]}")
        if style in STYLES and type(module) is not nn.Linear:
            raise ValueError(f"{path} is a {type(module).__name__}; tensor parallelism cuts nn.Linear only")
        styles[path] = style
    if not styles:
        raise ValueError(f"the base_model_tp_plan of {base.config.model_type!r} names no module of {name}; use tp=1")
    return styles


def _check_sizes(base: nn.Module, styles: dict[str, str], tp_size: int) -> None:
    for path, style in styles.items():
        dim = STYLES[style].dim if style in STYLES else None
        if dim is None:
            continue
        number = _HEADS_OF.get(path.rpartition(".")[2])
        heads = getattr(base.config, number, None) if number else None
        if heads and heads % tp_size:
            raise ValueError(f"tp={tp_size} does not divide {number}={heads} of {base.config.model_type!r}")
        shape = base.get_submodule(path).weight.shape
        if shape[dim] % tp_size:
            raise ValueError(f"tp={tp_size} does not divide dimension {dim} of {path}.weight, of shape {list(shape)}")


def _blocks(base: nn.Module, styles: dict[str, str]) -> dict[str, dict[str, Style]]:
    """Path of a block -> its linears to be shared. ValueError for a parameter between them that the plan leaves out."""
    blocks: dict[str, dict[str, Style]] = {}
    for path, style in styles.items():
        if style in STYLES:
            blocks.setdefault(path.rpartition(".")[0], {})[path] = STYLES[style]
    for block, linears in blocks.items():
        for name, _ in base.get_submodule(block).named_parameters():
            module = name.rpartition(".")[0]
            known = f"{block}.{module}" in styles or module in _BEFORE_HEADS
            if Style(dim=0) in linears.values() and not known:  # it might be one for each head
                raise ValueError(f"{block}.{name}: the base_model_tp_plan does not say how tp shares it; use tp=1")
    return blocks


def _one_input(block: nn.Module, linears: dict[str, Style]) -> bool:
    """Whether the block is some linears on its input and one that makes its output, without others between them."""
    dims = [style.dim for style in linears.values()]
    num_linears = sum(isinstance(module, nn.Linear) for module in block.modules())
    return dims.count(1) == 1 and dims.count(0) == num_linears - 1 > 0


def _check_vocabulary(model: nn.Module, tp_size: int) -> None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(embedding) is not nn.Embedding and not hasattr(embedding, "scalar_embed_scale"):
        raise ValueError(f"the embedding is a {type(embedding).__name__}; tensor parallelism cuts nn.Embedding only")
    if head is not None and type(head) is not nn.Linear:
        raise ValueError(f"the head is a {type(head).__name__}; tensor parallelism cuts nn.Linear only")
    size = embedding.weight.shape[0]
    if head is not None and head.weight.shape[0] != size:
        raise ValueError(f"the head has {head.weight.shape[0]} rows, the embedding {size}; use tp=1")
    if share(size, tp_size, tp_size - 1)[0] >= size:
        raise ValueError(f"tp={tp_size} leaves a rank without a row of a vocabulary of {size}")


def _check_sequence_parallel(base: nn.Module, blocks: dict[str, dict[str, Style]]) -> None:
    """Every block of a layer must end in the linear that cuts the sequence again; the rest must be norms."""
    where = f"sequence_parallel: {type(base).__name__}"
    if not len(getattr(base, "layers", ())) or not isinstance(getattr(base, "norm", None), nn.Module):
        raise ValueError(f"{where} has no `layers` and `norm`, between which the sequence would be cut")
    for index, layer in enumerate(base.layers):
        for name, child in layer.named_children():
            dims = [style.dim for style in blocks.get(f"layers.{index}.{name}", {}).values()]
            is_norm = not dims and all(parameter.dim() < 2 for parameter in child.parameters())
            if not is_norm and (dims.count(1) != 1 or 0 not in dims):
                raise ValueError(f"{where}: the base_model_tp_plan does not cut all of layers.{index}.{name}")


def _shard_vocabulary(model: nn.Module, group: dist.ProcessGroup) -> None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    if tied:
        head.weight = nn.Parameter(head.weight.data, requires_grad=False)  # else it would be cut twice
    sharded = VocabParallelEmbedding(embedding, group)
    model.set_input_embeddings(sharded)
    if head is None:
        return
    head = TensorParallelLinear(head, Style(dim=0, whole=True), group)
    if tied:
        head.weight = sharded.weight
    model.set_output_embeddings(head)


def _open_block(block: nn.Module, group: dist.ProcessGroup, sequence: SequenceShards | None, one_input: bool) -> None:
    """Make the block's input whole. With `one_input` all that is done with it gives partial gradients."""

    def whole(hidden: torch.Tensor) -> torch.Tensor:
        if sequence is None:
            return copy(hidden, group)
        return (gather_sum if one_input else gather)(hidden, 1, sequence.length, group)

    def enter(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if args:
            return (whole(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": whole(kwargs["hidden_states"])}

    block.register_forward_pre_hook(enter, with_kwargs=True)


def _shard_sequence(base: nn.Module, sequence: SequenceShards, group: dist.ProcessGroup) -> None:
    """Cut before the first layer, joined after the last norm; what acts in between on parts has partial gradients."""

    def note_length(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        # In every layer: with activation checkpointing, layers run again after other forwards.
        if kwargs.get("position_embeddings") is None:
            raise ValueError(f"sequence_parallel: {type(layer).__name__} is called without position_embeddings")
        sequence.length = kwargs["position_embeddings"][0].shape[-2]

    def cut(layer: nn.Module, args: tuple) -> tuple:
        if args[0].shape[1] != sequence.length:
            raise ValueError(f"sequence_parallel: {args[0].shape[1]} tokens have {sequence.length} position_embeddings")
        return split(args[0], 1, group), *args[1:]

    for layer in base.layers:
        layer.register_forward_pre_hook(note_length, with_kwargs=True)
        for child in layer.children():
            if not any(isinstance(module, nn.Linear) for module in child.modules()):
                for norm in child.modules():
                    sum_gradients(norm, group)
    base.layers[0].register_forward_pre_hook(cut)
    sum_gradients(base.norm, group)
    base.norm.register_forward_hook(lambda norm, args, out: gather(out, 1, sequence.length, group))
