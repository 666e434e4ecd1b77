"""Frozen weights kept in FP8: the same bytes as in the file, and to the bit the model that dequantises them."""

import json

import pytest
import torch
from distributed import pool
from fp8_checkpoint import make_fp8_dir
from parity import lora_config, randomise_lora_B
from peft import LoraConfig
from tiny_models import token_batch
from torch import nn

from coati_ext.checkpoint_io.keep_fp8 import keep_fp8
from coati_ext.checkpoint_io.layout import Layout
from coati_ext.checkpoint_io.load import build_meta_model, load_weights
from coati_ext.models.fp8_linear import Fp8Linear
from coati_ext.models.lora import adapters_disabled, inject_lora
from coati_ext.models.shard import shard_decoder
from coati_ext.moe.experts import MoeExperts
from tests.checkpoint_io.meta_models import CPU, ONE, edit, save_model, shard

FP8 = torch.float8_e4m3fn
WHOLE_BLOCKS = {"moe_intermediate_size": 128}  # else the halves of gate_up_proj begin within a block


@pytest.fixture(scope="module", params=[{}, WHOLE_BLOCKS], ids=["ragged", "whole"])
def directory(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "fp8"
    make_fp8_dir(folder, mtp=True, **request.param)
    return folder


def load(directory, *, kept: bool, dtype=torch.float32, lora: LoraConfig | None = None):
    model = build_meta_model(directory, dtype)
    shard_decoder(model)
    report = keep_fp8(model, directory) if kept else None
    loaded = load_weights(model, directory, *ONE, device=CPU)
    if lora is not None:
        inject_lora(model, lora, seed=3)
        randomise_lora_B(model)
    return model, report, loaded


def test_the_files_bytes_are_kept_with_their_scales(directory):
    model, report, loaded = load(directory, kept=True)
    kept = [module for module in model.modules() if isinstance(module, Fp8Linear | MoeExperts)]
    assert {type(module) for module in kept} == {Fp8Linear, MoeExperts} and not report.dequantized
    assert report.num_elements == sum(p.numel() for p in model.parameters() if p.dtype == FP8)
    assert f"kept in FP8: {report.num_kept} weights" in report.format()
    assert loaded.nbytes_read < loaded.nbytes_total  # all but multi-token prediction
    state = dict(model.named_parameters())
    experts = "model.layers.1.mlp.experts"
    assert state[f"{experts}.gate_up_proj"].dtype == state["model.layers.0.self_attn.o_proj.weight"].dtype == FP8
    assert state[f"{experts}.gate_up_proj_scale_inv"].dtype == torch.float32
    assert state["model.layers.1.mlp.gate.weight"].dtype == state["lm_head.weight"].dtype == torch.float32


def test_fp8_compute_reaches_every_module_that_keeps_fp8_and_is_reported(directory):
    model = build_meta_model(directory, torch.float32)
    shard_decoder(model)
    report = keep_fp8(model, directory, fp8_compute=True)
    assert "forward products round their rows to FP8" in report.format()
    kept = [module for module in model.modules() if isinstance(module, Fp8Linear | MoeExperts)]
    assert kept and all(module.fp8_compute for module in kept)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    tokens_BS = token_batch(2, 9)
    embeds_BSH = model.get_input_embeddings()(tokens_BS).detach().requires_grad_()
    logits = model(inputs_embeds=embeds_BSH).logits
    probe = torch.randn(logits.shape, generator=torch.Generator().manual_seed(4))
    (logits * probe).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), "inputs_embeds": embeds_BSH.grad, **found}


@pytest.mark.parametrize("in_one_function", [True, False])
def test_output_and_every_gradient_are_those_of_the_dequantised_model(directory, in_one_function):
    def run(kept):
        model, *_ = load(directory, kept=kept, lora=lora_config(["all"]))
        for module in model.modules():
            if isinstance(module, MoeExperts):
                module._is_swiglu = in_one_function
        return gradients(model)

    ours, expected = run(True), run(False)
    assert ours.keys() == expected.keys() and len(ours) > 20
    for name, tensor in expected.items():
        assert (ours[name] - tensor).norm() <= 1e-5 * tensor.norm(), name  # the weights are the same to the bit
    assert all(tensor.any() for name, tensor in ours.items() if "experts.lora" not in name)


@torch.no_grad()
def test_without_its_adapter_it_is_the_base_model(directory):
    (model, *_), (base, *_) = load(directory, kept=True, lora=lora_config(["all"])), load(directory, kept=False)
    expected = base(token_batch()).logits
    assert (model(token_batch()).logits - expected).norm() > 0.01 * expected.norm()
    with adapters_disabled(model):
        torch.testing.assert_close(model(token_batch()).logits, expected)


def one_step(directory: str, kept: bool, precision: str) -> tuple[dict[str, torch.Tensor], bool]:
    """The adapter of this rank after a step under ep 2, and whether what was kept is still the file's bytes."""
    from coati_ext import compat

    compat.apply()
    from colossalai.booster import Booster

    from coati_ext.plugin import MoeLoraPlugin

    plugin = MoeLoraPlugin(ep_size=2, precision=precision, max_norm=0.0)
    booster = Booster(plugin=plugin)
    model = build_meta_model(directory, plugin.dtype)
    plugin.shard(model)
    if kept:
        keep_fp8(model, directory)
    load_weights(model, directory, plugin.layout, plugin.layout_rank, device=CPU)
    before = {name: p.view(torch.uint8).clone() for name, p in model.named_parameters() if p.dtype == FP8}
    booster.enable_lora(model, lora_config=lora_config(["all"]))
    randomise_lora_B(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    boosted, optimizer, *_ = booster.boost(model, optimizer)
    tokens = token_batch(2, 9)
    booster.backward(boosted(input_ids=tokens, labels=tokens).loss, optimizer)
    optimizer.step()
    after = {name.replace(".base_layer", ""): p for name, p in model.named_parameters() if p.dtype == FP8}
    same = before.keys() == after.keys() and all(torch.equal(after[n].view(torch.uint8), b) for n, b in before.items())
    adapter = {name: p.detach().float() for name, p in model.named_parameters() if p.requires_grad}
    return adapter, same and bool(before) == kept


def test_a_step_under_expert_parallelism_is_that_of_the_dequantised_model(directory):
    kept, plain = (pool(2).run(one_step, str(directory), keep, "fp32") for keep in (True, False))
    for (ours, same), (expected, _) in zip(kept, plain, strict=True):
        assert same and ours.keys() == expected.keys()
        for name, tensor in expected.items():
            assert (ours[name] - tensor).norm() <= 1e-6 * tensor.norm(), name


def test_a_wrapper_of_16_bits_leaves_what_is_kept(directory):
    for adapter, same in pool(2).run(one_step, str(directory), True, "bf16"):
        assert same and all(tensor.isfinite().all() for tensor in adapter.values())


def test_factors_are_of_the_compute_dtype_and_no_cast_touches_what_is_kept(directory):
    model, *_ = load(directory, kept=True, dtype=torch.bfloat16, lora=lora_config(["all"]))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert {p.dtype for name, p in before.items() if "lora_" in name} == {torch.bfloat16}
    model.half()
    model.to(torch.float32)
    for name, p in model.named_parameters():
        if before[name].dtype == FP8:
            assert p.dtype == FP8 and torch.equal(p.view(torch.uint8), before[name].view(torch.uint8)), name
        elif name.endswith("_scale_inv"):
            assert p.dtype == torch.float32 and torch.equal(p, before[name]), name
        else:
            assert p.dtype == torch.float32, name


@pytest.mark.parametrize("rank", range(4))
def test_each_rank_keeps_its_experts_and_layers(directory, rank):
    whole, *_ = load(directory, kept=True)
    layout = Layout(ep=2, pp=2, dp=2)
    model = build_meta_model(directory, torch.float32)
    shard(model, layout, rank)
    keep_fp8(model, directory)
    load_weights(model, directory, layout, rank, device=CPU)
    expected, ep = dict(whole.named_parameters()), layout.coordinates(rank).ep
    num_kept = 0
    for name, p in model.named_parameters():
        full = expected[name].chunk(2)[ep] if ".mlp.experts." in name else expected[name]
        assert p.dtype == full.dtype and torch.equal(p.float(), full.float()), name
        num_kept += p.dtype == FP8
    assert num_kept


def test_what_cannot_be_kept_is_refused_by_name(tmp_path):
    save_model(tmp_path / "bf16", "deepseek_v3")
    with pytest.raises(ValueError, match=r"bf16 has no FP8 weights; make an FP8 checkpoint"):
        keep_fp8(build_meta_model(tmp_path / "bf16", torch.float32), tmp_path / "bf16")

    make_fp8_dir(tmp_path / "fp8", num_shards=1)
    (tmp_path / "fp8" / "model.safetensors.index.json").unlink()
    [file] = (tmp_path / "fp8").glob("*.safetensors")
    file.rename(tmp_path / "fp8" / "model.safetensors")
    name = "model.layers.1.mlp.experts.2.up_proj.weight"

    def change(tensors):
        del tensors[f"{name}_scale_inv"]
        tensors[name] = tensors[name].float()

    edit(tmp_path / "fp8", change)
    with pytest.raises(ValueError, match=rf"{name} is torch.float32; all of model.layers.1.mlp.experts.gate_up_proj"):
        keep_fp8(build_meta_model(tmp_path / "fp8", torch.float32), tmp_path / "fp8")

    make_fp8_dir(tmp_path / "blocks")
    config = json.loads((tmp_path / "blocks" / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [64, 128]
    (tmp_path / "blocks" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"has blocks of \[64, 128\]; only \[128, 128\] can be kept"):
        keep_fp8(build_meta_model(tmp_path / "blocks", torch.float32), tmp_path / "blocks")
