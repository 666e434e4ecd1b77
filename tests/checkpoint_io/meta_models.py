"""Checkpoints to load, and models sharded by hand, with plain `chunk`s: what the loader's slices are compared with."""

import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from torch import nn
from transformers import PreTrainedModel

from coati_ext.checkpoint_io.layout import Coordinates, Layout
from coati_ext.checkpoint_io.load import LoadReport, build_meta_model, load_weights
from coati_ext.moe.experts import MoeExperts, is_experts_module

CPU = torch.device("cpu")
ONE = (Layout(), 0)
_ROWS = re.compile(r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj|w1|w3|embed_tokens|lm_head)\.weight$|^lm_head\.weight$")
_COLUMNS = re.compile(r"\.(o_proj|down_proj|w2)\.weight$")


def save_model(directory: Path, family: str, **kwargs) -> Path:
    """A checkpoint with the names that published ones have, or with `save_original_format=False` stacked ones."""
    save = {key: kwargs.pop(key) for key in ("save_original_format", "max_shard_size") if key in kwargs}
    model = tiny_model(family, **kwargs)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer)
    model.save_pretrained(directory, **save)
    return directory


def edit(directory: Path, change) -> None:
    """Apply `change` to the dict of the tensors of a checkpoint of one file."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def loaded(directory: Path, dtype: torch.dtype = torch.float32, **kwargs) -> tuple[PreTrainedModel, LoadReport]:
    model = build_meta_model(directory, dtype)
    return model, load_weights(model, directory, *ONE, device=CPU, **kwargs)


def cut(name: str, full: torch.Tensor, layout: Layout, place: Coordinates) -> torch.Tensor:
    """The rank's slice of a weight of a llama or mixtral, or of any family where tp is 1."""
    if ".mlp.experts." in name:
        full = full.chunk(layout.ep)[place.ep]
        if name.endswith("down_proj"):
            return full.chunk(layout.tp, 2)[place.tp]
        return torch.cat([half.chunk(layout.tp, 1)[place.tp] for half in full.chunk(2, 1)], 1)
    if layout.tp > 1 and (_ROWS.search(name) or _COLUMNS.search(name)):
        return full.chunk(layout.tp, 0 if _ROWS.search(name) else 1)[place.tp]
    return full


def num_readers(name: str, layout: Layout, *, tied: bool) -> int:
    """How often all ranks together read a tensor of a checkpoint.

    An expert's is on one EP rank of each copy, another on all data ranks; a tied embedding is on two stages. TP ranks
    share what is cut by rows; where columns are cut or nothing is, each reads all.
    """
    is_expert = ".experts." in name
    on_data_ranks = layout.moe_dp if is_expert else layout.dp
    on_stages = 2 if tied and layout.pp > 1 and name == "model.embed_tokens.weight" else 1
    on_tp_ranks = 1 if _ROWS.search(name) or name.endswith("experts.gate_up_proj") else layout.tp
    return on_data_ranks * on_stages * on_tp_ranks


def shard(model: PreTrainedModel, layout: Layout, rank: int) -> None:
    """Leave the rank's weights, still on the meta device."""
    place = layout.coordinates(rank)
    decoder = model.model
    counts = layout.layers_per_stage(len(decoder.layers))
    first = sum(counts[: place.pp])
    for i in set(range(len(decoder.layers))) - set(range(first, first + counts[place.pp])):
        decoder.layers[i] = nn.Identity()
    if place.pp > 0:
        decoder.embed_tokens = nn.Identity()
    if place.pp < layout.pp - 1:
        decoder.norm, model.lm_head = nn.Identity(), nn.Identity()
    for path, module in list(model.named_modules()):
        if is_experts_module(module):
            experts = MoeExperts(module)
            experts.num_local_experts = experts.num_experts // layout.ep
            experts.first_expert = place.ep * experts.num_local_experts
            model.set_submodule(path, experts)
    made = {}
    for name, old in list(model.named_parameters(remove_duplicate=False)):
        path, _, leaf = name.rpartition(".")
        new = nn.Parameter(cut(name, old.detach(), layout, place), requires_grad=old.requires_grad)
        setattr(model.get_submodule(path), leaf, made.setdefault(old, new))
