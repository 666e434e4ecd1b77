"""Sharded models saved as checkpoints: what loads again is, bit for bit, one process's model with the same change."""

import json
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import pool
from fp8_checkpoint import dequantize, make_fp8_dir
from model_dir import make_model_dir
from transformers import AutoTokenizer

from coati_ext.checkpoint_io import save_model as module
from coati_ext.checkpoint_io.checkpoint import read_checkpoint
from coati_ext.checkpoint_io.layout import Layout
from coati_ext.checkpoint_io.load_plan import named_weights
from coati_ext.checkpoint_io.save_model import save_model
from tests.checkpoint_io.changed_models import (
    EMBEDDING,
    HEAD,
    ONE,
    change,
    check_loads_as,
    content,
    counting,
    reference,
    save_one,
    save_part,
)
from tests.checkpoint_io.meta_models import edit, loaded
from tests.checkpoint_io.meta_models import save_model as save_base

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


EP2, PP2, DP2, TP2 = Layout(ep=2), Layout(pp=2), Layout(dp=2), Layout(tp=2)
EP2_PP2 = Layout(ep=2, pp=2)
CASES = {
    "mixtral, ep 2": ("mixtral", EP2, {}),
    "mixtral, ep 2, stacked": ("mixtral", EP2, dict(save_original_format=False)),
    "mixtral, ep 2 x dp 2": ("mixtral", Layout(ep=2, dp=4), {}),
    "mixtral, ep 2 x tp 2": ("mixtral", Layout(ep=2, tp=2), {}),
    "mixtral, ep 2 x tp 2, stacked": ("mixtral", Layout(ep=2, tp=2), dict(save_original_format=False)),
    "qwen3_moe, ep 2 x pp 2, many files": ("qwen3_moe", EP2_PP2, dict(max_shard_size="40KB")),
    "qwen3_moe, dp 2": ("qwen3_moe", DP2, {}),
    "deepseek_v3, ep 2 x pp 2": ("deepseek_v3", EP2_PP2, {}),
    "deepseek_v3, uneven stages": ("deepseek_v3", Layout(pp=2, num_layers_per_stage=(1, 2)), {}),
    "llama, dp 2": ("llama", DP2, {}),
    "llama, tp 2": ("llama", TP2, {}),
    "llama, tied, pp 2": ("llama", PP2, dict(tie_word_embeddings=True)),
    "llama, tied, tp 2 x pp 2": ("llama", Layout(tp=2, pp=2), dict(tie_word_embeddings=True)),
}


def add_mtp(base: Path) -> set[str]:
    """A layer of multi-token prediction, as deepseek has it behind the others."""
    added = {}

    def add(tensors):
        for name, tensor in list(tensors.items()):
            if ".layers.2." in name:
                added[name.replace(".layers.2.", ".layers.3.")] = tensor + 1
        added["model.layers.3.eh_proj.weight"] = torch.randn(32, 64)
        tensors |= added

    edit(base, add)
    return set(added)


@pytest.mark.parametrize("case", CASES)
def test_any_layout_saves_the_model_of_one_process(case, tmp_path):
    family, layout, kwargs = CASES[case]
    base, output = save_base(tmp_path / "base", family, **kwargs), tmp_path / "out"
    copied = add_mtp(base) if family == "deepseek_v3" else set()
    results = pool(layout.world_size).run(save_part, str(base), str(output), layout, {})
    assert [error for _, error in results] == [""] * layout.world_size
    check_loads_as(output, reference(base))
    before, after = content(base), content(output)
    assert {n: (t.shape, t.dtype) for n, t in before.items()} == {n: (t.shape, t.dtype) for n, t in after.items()}
    assert {name for name in before if torch.equal(before[name], after[name])} == copied
    assert sum(nbytes for nbytes, _ in results) == sum(tensor.nbytes for tensor in after.values())  # each byte once


def test_data_parallel_ranks_leave_the_writing_to_the_first(tmp_path):
    base = save_base(tmp_path / "base", "llama")
    (first, _), (second, _) = pool(2).run(save_part, str(base), str(tmp_path / "out"), DP2, {})
    assert first == read_checkpoint(base).nbytes and second == 0


def test_experts_are_written_by_their_ranks(tmp_path):
    base = save_base(tmp_path / "base", "mixtral")
    experts = sum(entry.nbytes for name, entry in read_checkpoint(base).tensors.items() if ".experts." in name)
    (_, _), (second, _) = pool(2).run(save_part, str(base), str(tmp_path / "out"), EP2, {})
    assert second == experts // 2


def test_ranks_that_share_a_layout_rank_write_once(tmp_path):
    base, output = save_base(tmp_path / "base", "llama"), tmp_path / "out"
    (first, _), (second, _) = pool(2).run(_save_replica, str(base), str(output))
    assert first == read_checkpoint(base).nbytes and second == 0
    check_loads_as(output, reference(base))


def _save_replica(base: str, output: str) -> tuple[int, str]:
    written = []
    model, _ = loaded(Path(base))
    with mock.patch.object(module, "_pwrite", counting(written)):
        save_model(change(model), output, **{**ONE, "group": dist.group.WORLD}, pretrained=base)
    return sum(written), ""


# --- one process


def test_files_are_of_the_size_and_order_that_was_asked_for(tmp_path):
    base, output = save_base(tmp_path / "base", "qwen3_moe", max_shard_size="50KB"), tmp_path / "out"
    save_one(base, output, max_shard_size=30_000)
    before, after = read_checkpoint(base), read_checkpoint(output)
    assert list(after.tensors) == list(before.tensors)
    assert len(after.shards) > len(before.shards)
    for name, entries in after.shards.items():
        assert sum(entry.nbytes for entry in entries) <= 30_000 or len(entries) == 1, name
    assert next(iter(after.shards)) == f"model-00001-of-{len(after.shards):05d}.safetensors"
    check_loads_as(output, reference(base))


def test_a_tensor_is_aligned_to_its_dtype(tmp_path):
    base, output = save_base(tmp_path / "base", "deepseek_v3", std=0.2), tmp_path / "out"
    edit(base, lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items() if "bias" not in n}))
    save_one(base, output)
    entries = read_checkpoint(output).tensors.values()
    assert {entry.dtype for entry in entries} == {FP32, BF16}
    assert all(entry.start % entry.dtype.itemsize == 0 for entry in entries)
    assert {e.name: e.dtype for e in entries} == {e.name: e.dtype for e in read_checkpoint(base).tensors.values()}


def test_the_directory_is_complete(tmp_path):
    base, _ = make_model_dir(tmp_path)
    (base / "LICENSE").write_text("free")
    (base / "generation_config.json").write_text('{"temperature": 0.5}')
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = "{{ messages }}"
    save_one(base, tmp_path / "out", tokenizer=tokenizer)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == "{{ messages }}"
    for file in ("LICENSE", "generation_config.json", "config.json"):
        assert (tmp_path / "out" / file).read_bytes().strip() == (base / file).read_bytes().strip()
    assert {f.name for f in (tmp_path / "out").iterdir()} == {f.name for f in base.iterdir()} | {"README.md"}
    assert f"fully fine-tuned\n\n- Base model: {base}\n" in (tmp_path / "out" / "README.md").read_text()
    umask = os.umask(0)
    os.umask(umask)
    assert all(file.stat().st_mode & 0o777 == 0o666 & ~umask for file in (tmp_path / "out").glob("*.safetensors"))


@pytest.mark.parametrize("kept", [{EMBEDDING}, {HEAD}, {EMBEDDING, HEAD}], ids=["embedding", "head", "both"])
def test_tied_weights_are_under_the_names_that_the_base_has(kept, tmp_path):
    base, output = save_base(tmp_path / "base", "llama", tie_word_embeddings=True), tmp_path / "out"

    def rename(tensors):
        weight = tensors.pop(EMBEDDING)
        tensors |= {name: weight.clone() for name in kept}

    edit(base, rename)
    model = save_one(base, output)
    after = content(output)
    assert kept == {EMBEDDING, HEAD} & after.keys()
    assert all(torch.equal(after[name], model.lm_head.weight) for name in kept)
    check_loads_as(output, model)


def test_tied_weights_that_were_trained_apart_are_refused(tmp_path):
    base, output = save_base(tmp_path / "base", "llama", tie_word_embeddings=True), tmp_path / "out"
    model, _ = loaded(base)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    save_model(model, output, **ONE, pretrained=base)
    model.lm_head.weight.data[-1, -1] += 1
    with pytest.raises(ValueError, match=r"embed_tokens.weight of the base is both \S+ and \S+ of the model, but"):
        save_model(model, output, **ONE, pretrained=base)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_another_dtype(dtype, tmp_path):
    base, output = save_base(tmp_path / "base", "deepseek_v3"), tmp_path / "out"
    copied = add_mtp(base)
    save_one(base, output, dtype=dtype)
    before, after = content(base), content(output)
    assert all(torch.equal(before[name], after[name]) for name in copied)
    for name in after.keys() - copied:
        assert after[name].dtype == (FP32 if name.endswith("e_score_correction_bias") else dtype), name
    assert json.loads((output / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    expected = reference(base)
    for name, owner, leaf in named_weights(expected):
        if not name.endswith("e_score_correction_bias"):
            getattr(owner, leaf).data = getattr(owner, leaf).data.to(dtype)
    check_loads_as(output, expected)


def test_another_dtype_is_for_what_is_of_the_usual_one(tmp_path):
    base, output = save_base(tmp_path / "base", "mixtral"), tmp_path / "out"
    edit(base, lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items() if "gate.weight" not in n}))
    save_one(base, output, dtype=FP16)
    dtypes = {name: entry.dtype for name, entry in read_checkpoint(output).tensors.items()}
    assert {name for name, dtype in dtypes.items() if dtype == FP32} == {n for n in dtypes if "gate.weight" in n}
    assert set(dtypes.values()) == {FP32, FP16}


# --- FP8


@pytest.mark.parametrize("layout", [Layout(), EP2, PP2], ids=["one", "ep 2", "pp 2"])
def test_an_fp8_base_becomes_bf16(layout, tmp_path):
    base, output = tmp_path / "base", tmp_path / "out"
    tensors = make_fp8_dir(base, mtp=True)
    if layout.world_size == 1:
        save_one(base, output)
    else:
        results = pool(layout.world_size).run(save_part, str(base), str(output), layout, {})
        assert [error for _, error in results] == [""] * layout.world_size
    after = content(output)
    assert after.keys() == {name for name in tensors if not name.endswith("_scale_inv")}
    assert {name for name, tensor in after.items() if tensor.dtype != BF16} == {
        name for name in after if name.endswith("e_score_correction_bias")
    }
    copied = [name for name in after if ".layers.2." in name]
    assert len(copied) > 10
    for name in copied:
        scale = tensors.get(name + "_scale_inv")
        expected = tensors[name] if scale is None else dequantize(tensors[name], scale).to(after[name].dtype)
        assert torch.equal(after[name], expected), name
    config = json.loads((output / "config.json").read_text())
    assert "quantization_config" not in config and config["num_nextn_predict_layers"] == 1
    expected = change(loaded(base)[0])
    for name, owner, leaf in named_weights(expected):
        if not name.endswith("e_score_correction_bias"):
            getattr(owner, leaf).data = getattr(owner, leaf).data.bfloat16()
    check_loads_as(output, expected)
