"""Models that were trained, so to speak, in any layout: every weight is changed alike, whatever part a rank has."""

import zlib
from functools import cache
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel

from coati_ext.checkpoint_io import save_model as module
from coati_ext.checkpoint_io import stream
from coati_ext.checkpoint_io.layout import Layout
from coati_ext.checkpoint_io.load import build_meta_model, load_weights
from coati_ext.checkpoint_io.load_plan import named_weights
from coati_ext.checkpoint_io.save_model import save_model
from coati_ext.models.shard import shard_decoder
from coati_ext.moe.experts import MoeExperts, is_experts_module
from tests.checkpoint_io.meta_models import loaded, shard

ONE = dict(layout=Layout(), rank=0, group=None)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def change(model: PreTrainedModel) -> PreTrainedModel:
    """Multiply every weight, and every expert of a stack, by a number of its own."""
    seen = set()
    for name, owner, leaf in named_weights(model):
        weight = getattr(owner, leaf).data
        if weight.data_ptr() in seen:
            continue
        seen.add(weight.data_ptr())
        tied = model.config.tie_word_embeddings and name in (EMBEDDING, HEAD)
        if is_experts_module(owner):
            first = owner.first_expert if isinstance(owner, MoeExperts) else 0
            for i, expert in enumerate(weight):
                expert.mul_(factor(f"{name}.{first + i}"))
        else:
            weight.mul_(factor(EMBEDDING if tied else name))
    return model


def factor(name: str) -> float:
    return 1 + zlib.crc32(name.encode()) / 2**33


@cache
def ep_group(layout: Layout) -> dist.ProcessGroup:
    mine = layout.coordinates(dist.get_rank())
    for rank in range(layout.world_size):
        place = layout.coordinates(rank)
        if place.ep == 0:
            members = [layout.rank(place._replace(ep=ep)) for ep in range(layout.ep)]
            group = dist.new_group(members)
            if place == mine._replace(ep=0):
                found = group
    return found


def changed_part(base: str | Path, layout: Layout, rank: int) -> PreTrainedModel:
    """This rank's part of the base, loaded and changed."""
    model = build_meta_model(base, torch.float32)
    place = layout.coordinates(rank)
    if layout.tp > 1:
        shard(model, layout, rank)
    else:
        counts = layout.layers_per_stage(len(model.model.layers))
        shard_decoder(model, ep_group=ep_group(layout), layers_per_stage=counts, stage=place.pp)
    load_weights(model, base, layout, rank, device="cpu")
    return change(model)


def save_part(base: str, output: str, layout: Layout, kwargs: dict, break_on_rank_1=None) -> tuple[int, str]:
    """(Bytes that this rank wrote, its error)."""
    rank, written = dist.get_rank(), []
    model = changed_part(base, layout, rank)
    where = dict(pretrained=base, layout=layout, rank=rank, group=dist.group.WORLD)
    patches = {"_pwrite": counting(written)}
    if rank == 1 and break_on_rank_1 is not None:
        patches |= break_on_rank_1(model, kwargs) or {}
    with mock.patch.multiple(module, **patches), mock.patch.object(stream, "STRIP_ELEMENTS", 100):  # some 3 rows
        try:
            save_model(model, output, **{**where, **kwargs})
        except (ValueError, OSError) as error:
            return sum(written), f"{type(error).__name__}: {error}"
    return sum(written), ""


def counting(written: list[int]):
    write = module._pwrite

    def counted(file, ranges):
        written.append(write(file, ranges))
        return written[-1]

    return counted


def content(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
    return tensors


def check_loads_as(output: Path, reference: PreTrainedModel) -> None:
    found, info = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    expected = {name: getattr(owner, leaf) for name, owner, leaf in named_weights(reference)}
    names = {name for name, *_ in named_weights(found)}
    assert names == expected.keys()
    for name, owner, leaf in named_weights(found):
        tensor = getattr(owner, leaf)
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


def reference(base: Path) -> PreTrainedModel:
    return change(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))


def save_one(base: Path, output: Path, **kwargs) -> PreTrainedModel:
    model = change(loaded(base)[0])
    save_model(model, output, **ONE, pretrained=base, **kwargs)
    return model
