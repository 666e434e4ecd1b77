"""Merging adapters into bases on disk: the logits, every weight, what is refused."""

import json
from pathlib import Path

import pytest
import torch
from fp8_checkpoint import dequantize, make_fp8_dir
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model, token_batch
from transformers import AutoModelForCausalLM

from applications.merge_adapter import main
from tests.checkpoint_io.adapters import WEIGHTS, edit_config, edit_tensors, lora_model, save_base, saved

INDEX = "model.safetensors.index.json"
E4M3 = torch.float8_e4m3fn
RANK, ALPHA = 3, 6.0
UNTOUCHED = "model.layers.1.mlp.experts.3.up_proj"


def merge(base: str | Path, adapter: Path, output: Path, *flags: str) -> int:
    return main(["--pretrained", str(base), "--adapter", str(adapter), "--output", str(output), *flags])


def load_dir(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(token_batch()).logits


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_the_merged_model_computes_what_base_and_adapter_do(family, tmp_path, capsys):
    base, model = save_base(family, tmp_path), lora_model(family)
    assert merge(base, saved(model, tmp_path, base), tmp_path / "out") == 0
    num_tensors = len(load_file(tmp_path / "adapter" / WEIGHTS))
    assert f"{num_tensors} adapter tensors, all used" in capsys.readouterr().out
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    expected = logits(model)
    assert (merged - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (merged - logits(tiny_model(family))).abs().max() > 0.1 * expected.abs().max()


def test_files_and_names_are_the_base_s(tmp_path):
    base, model = save_base("qwen3_moe", tmp_path), lora_model("qwen3_moe", ["experts"])
    (Path(base) / "model.safetensors").unlink()
    tiny_model("qwen3_moe").save_pretrained(base, max_shard_size="40KB")
    assert merge(base, saved(model, tmp_path, base), tmp_path / "out") == 0
    assert {f.name for f in Path(base).iterdir()} | {"README.md"} == {f.name for f in (tmp_path / "out").iterdir()}
    assert (
        json.loads((Path(base) / INDEX).read_text())["weight_map"]
        == json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]
    )
    before, after = load_dir(Path(base)), load_dir(tmp_path / "out")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if ".experts." in name}


def test_the_model_card_names_the_base_the_adapter_and_what_was_merged(tmp_path):
    base, model = save_base("qwen3_moe", tmp_path), lora_model("qwen3_moe", ["experts"])
    adapter = saved(model, tmp_path, base)
    assert merge(base, adapter, tmp_path / "out") == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith(f'---\nbase_model: "{base}"\nlibrary_name: transformers\n')
    assert f"- Base model: {base}\n- Adapter: {adapter}, rank 4, scaling 3\n- Merged: 96 adapter tensors" in card


def write_adapter(folder: Path, weights: dict[str, torch.Tensor], scale: float = 0.02, **config) -> dict:
    """A random pair for every linear of `weights`, B = 0 for one of them; path -> (A, B)."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    pairs = {}
    for name, weight in weights.items():
        linear = weight.dim() == 2 and not any(p in name for p in ("embed", "lm_head", "gate.weight", "_scale_inv"))
        if linear:
            a = torch.randn(RANK, weight.shape[1], generator=generator) * scale
            b = torch.randn(weight.shape[0], RANK, generator=generator) * scale
            path = name.removesuffix(".weight")
            pairs[path] = (a, b * (path != UNTOUCHED))
    tensors = {
        f"base_model.model.{p}.lora_{k}.weight": t for p, ab in pairs.items() for k, t in zip("AB", ab, strict=True)
    }
    save_file(tensors, folder / WEIGHTS)
    content = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["x"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return pairs


def assert_rounded(found: torch.Tensor, exact: torch.Tensor, name: str) -> None:
    """Within one step of bf16: half for the rounding, the rest for the float32 sum of r products."""
    step = torch.ldexp(torch.full_like(exact, 2.0**-8), torch.frexp(exact.abs()).exponent)
    assert ((found.double() - exact).abs() <= 0.51 * step + 1e-7 * exact.abs().max()).all(), name


def test_a_bf16_base_is_rounded_once(tmp_path, capsys):
    tiny_model("deepseek_v3").bfloat16().save_pretrained(tmp_path / "base")
    before = load_dir(tmp_path / "base")
    pairs = write_adapter(tmp_path / "adapter", before, use_rslora=True)
    assert merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", "--workers", "3") == 0
    after = load_dir(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert after[name].dtype == value.dtype
        a, b = pairs.get(name.removesuffix(".weight"), (None, None))
        if a is None or not b.any():
            assert torch.equal(after[name], value), name
        else:
            assert_rounded(after[name], value.double() + ALPHA / RANK**0.5 * b.double() @ a.double(), name)
    assert "1 have lora_B = 0" in capsys.readouterr().out


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    """(base, its tensors, adapter, its pairs); some scales are in another shard than their weight."""
    folder = tmp_path_factory.mktemp("merge")
    tensors = make_fp8_dir(folder / "base", mtp=True)
    where = json.loads((folder / "base" / INDEX).read_text())["weight_map"]
    apart = [name for name in tensors if name + "_scale_inv" in where and where[name] != where[name + "_scale_inv"]]
    assert 0 < len(apart) < sum(t.dtype == E4M3 for t in tensors.values())
    weights = {name: value for name, value in tensors.items() if ".layers.2." not in name}
    return folder / "base", tensors, folder / "adapter", write_adapter(folder / "adapter", weights)


def exact_sums(tensors, pairs):
    for path, (a, b) in pairs.items():
        name = f"{path}.weight"
        weight = dequantize(tensors[name], tensors[name + "_scale_inv"])
        yield name, weight + ALPHA / RANK * b.double() @ a.double()


def test_an_fp8_base_stays_fp8(fp8, tmp_path):
    base, before, adapter, pairs = fp8
    assert merge(base, adapter, tmp_path / "out") == 0
    after = load_dir(tmp_path / "out")
    assert {n: (t.dtype, t.shape) for n, t in before.items()} == {n: (t.dtype, t.shape) for n, t in after.items()}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads((base / "config.json").read_text())
    changed = set()
    for name, exact in exact_sums(before, pairs):
        found, scale = after[name], after[name + "_scale_inv"]
        if name == f"{UNTOUCHED}.weight":
            continue
        changed |= {name, name + "_scale_inv"}
        error = dequantize(found, scale) - exact
        assert (error.abs() <= exact.abs() / 16 + dequantize(torch.ones(found.shape).to(E4M3), scale) * 2**-10).all()
        assert error.square().mean() < 0.03**2 * exact.square().mean()
        blocks = exact.abs()[:128, :128].max()
        assert abs(scale[0, 0].item() * 448 - blocks) < 1e-6 * blocks
    for name in before.keys() - changed:
        assert torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)), name


def test_an_fp8_base_can_be_written_in_bf16(fp8, tmp_path):
    base, before, adapter, pairs = fp8
    assert merge(base, adapter, tmp_path / "out", "--output_dtype", "bf16") == 0
    after = load_dir(tmp_path / "out")
    assert after.keys() == {name for name in before if not name.endswith("_scale_inv")}
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    exact = dict(exact_sums(before, pairs))
    for name, value in after.items():
        if name in exact:
            assert_rounded(value, exact[name], name)
        elif before[name].dtype == E4M3:
            assert torch.equal(value, dequantize(before[name], before[name + "_scale_inv"]).bfloat16()), name
        else:
            assert torch.equal(value, before[name]), name


def test_powers_of_two_stay_powers_of_two(fp8, tmp_path):
    base, _, adapter, _ = fp8
    copy = tmp_path / "base"
    copy.mkdir()
    for file in base.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"]["scale_fmt"] = "ue8m0"
    (copy / "config.json").write_text(json.dumps(config))
    assert merge(copy, adapter, tmp_path / "out") == 0
    after = load_dir(tmp_path / "out")
    scale = after["model.layers.0.mlp.down_proj.weight_scale_inv"]
    assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))


def one_unused(tensors):
    tensors["base_model.model.model.layers.9.self_attn.o_proj.lora_A.weight"] = torch.ones(RANK, 8)
    tensors["base_model.model.model.layers.9.self_attn.o_proj.lora_B.weight"] = torch.ones(8, RANK)


def only_b(tensors):
    del tensors[f"base_model.model.{UNTOUCHED}.lora_A.weight"]


def transposed(tensors):
    name = f"base_model.model.{UNTOUCHED}.lora_B.weight"
    tensors[name] = torch.ones(7, RANK)


def no_effect(tensors):
    for name, tensor in tensors.items():
        tensor.mul_("lora_A" in name)


def infinite(tensors):
    next(t for n, t in tensors.items() if "layers.0.mlp.down_proj.lora_B" in n)[3, 1] = float("inf")


def stacked(tensors):
    tensors["base_model.model.model.layers.1.mlp.experts.lora_A.weight"] = torch.ones(4, 4)


@pytest.mark.parametrize(
    "edit, expected",
    [
        (one_unused, "2 tensors belong to no weight of"),
        (only_b, f"{UNTOUCHED} has only one of lora_A and lora_B"),
        (transposed, "do not fit the weight [136, 256]"),
        (no_effect, "every lora_B is zero, so there is nothing to merge"),
        (infinite, "model.layers.0.mlp.down_proj.weight: "),
        (stacked, "is in PEFT's fused expert form"),
    ],
)
def test_an_adapter_that_does_not_fit_is_named(edit, expected, fp8, tmp_path, capsys):
    base, tensors, _, _ = fp8
    write_adapter(tmp_path / "adapter", {n: t for n, t in tensors.items() if ".layers.2." not in n})
    edit_tensors(tmp_path / "adapter", edit)
    assert merge(base, tmp_path / "adapter", tmp_path / "out") == 1
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_another_adapter_does_not_continue_an_interrupted_merge(fp8, tmp_path, capsys):
    base, _, adapter, _ = fp8
    work = tmp_path / "out.incomplete"
    assert merge(base, adapter, tmp_path / "out") == 0
    (tmp_path / "out").rename(work)
    (work / ".coati_ext-journal.jsonl").write_text(json.dumps({"tool": "merge", "scaling": 1}) + "\n")
    assert merge(base, adapter, tmp_path / "out") == 1
    assert "left by a run with another" in capsys.readouterr().err


def test_options_that_the_merge_cannot_honour_are_refused(fp8, tmp_path, capsys):
    base, tensors, _, _ = fp8
    write_adapter(tmp_path / "adapter", tensors)
    edit_config(tmp_path / "adapter", init_lora_weights="pissa")
    assert merge(base, tmp_path / "adapter", tmp_path / "out") == 1
    assert "changes the base weights" in capsys.readouterr().err
    edit_config(tmp_path / "adapter", init_lora_weights=True, use_dora=True)
    assert merge(base, tmp_path / "adapter", tmp_path / "out") == 1
    assert "dora" in capsys.readouterr().err.lower()
    mixtral = save_base("mixtral", tmp_path)
    write_adapter(tmp_path / "other", load_dir(Path(mixtral)))
    assert merge(mixtral, tmp_path / "other", tmp_path / "out", "--output_dtype", "bf16") == 1
    assert "is not FP8; leave the flag out" in capsys.readouterr().err
