"""Conversions are judged by stock PEFT: what it trained or loads must compute the same in the other form, and every way
back must give the same bits. What cannot be converted exactly is refused by name."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers
from safetensors.torch import load_file
from tiny_models import tiny_model, token_batch

from coati_ext.checkpoint_io.adapter_directory import write_json
from coati_ext.checkpoint_io.convert_adapter import convert_adapter
from coati_ext.checkpoint_io.verify import verify_adapter
from tests.checkpoint_io.adapters import WEIGHTS, edit_config, edit_tensors, lora_model, save_base, saved
from tests.checkpoint_io.stock_peft import BOTH, convert, same_bits, stock_adapter

# PEFT looks for the patterns among its target modules only; it applies them to the target parameters all the same.
pytestmark = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")

ROOT = Path(__file__).resolve().parents[2]
# x·(W+ΔW) in fp32 with logits of about 5, the products summed in another order. A dropped layer moves them by > 0.5.
ROUNDING = 1e-5

MOE = ["mixtral", "qwen3_moe", "deepseek_v3"]
STOCK = {  # beside LoRA on o_proj, and on both parameters of the experts unless it says otherwise
    "both": {},
    "down alone": {"target_parameters": ["experts.down_proj"]},
    "gate_up alone": {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]},
    "one layer": {"target_parameters": [f"layers.1.mlp.{name}" for name in BOTH]},
    "rslora": {"use_rslora": True},
    "odd rank": {"r": 3},
    "uneven": {"rank_pattern": {"experts.gate_up_proj": 2, "down_proj": 8}, "alpha_pattern": {"down_proj": 5}},
}
OURS = {
    "all": "all",
    "experts": "experts",
    "down_proj": r".*\.mlp\.experts\.down_proj",
    "gate and up": [r".*\.mlp\.experts\.gate_proj", r".*\.mlp\.experts\.up_proj"],
    "one layer": r"model\.layers\.1\..*",
    "attention": "attention",
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return tmp_path_factory.mktemp("bases")


def peft_logits(family: str, adapter: Path) -> torch.Tensor:
    return PeftModel.from_pretrained(tiny_model(family), str(adapter)).eval()(token_batch()).logits.detach()


def base_logits(family: str) -> torch.Tensor:
    return tiny_model(family)(token_batch()).logits.detach()


def diff(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def config_of(adapter: Path) -> dict:
    return json.loads((adapter / "adapter_config.json").read_text())


@pytest.fixture
def ours(bases, tmp_path):
    """An adapter of a tiny Qwen3-MoE as `save_adapter` writes it."""
    return saved(lora_model("qwen3_moe"), tmp_path, save_base("qwen3_moe", bases))


@pytest.fixture
def stock(bases, tmp_path):
    """An adapter of a tiny Mixtral as stock PEFT writes it."""
    return stock_adapter(tmp_path / "stock", save_base("mixtral", bases), family="mixtral")[0]


# --- the same function


@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize("family", MOE)
def test_what_stock_peft_stacked_computes_the_same_per_expert(family, name, bases, tmp_path):
    base = save_base(family, bases)
    adapter, logits = stock_adapter(tmp_path / "stock", base, family=family, **STOCK[name])
    assert diff(logits, base_logits(family)) > 0.5
    per_expert = convert(adapter, "per-expert")
    assert diff(peft_logits(family, per_expert), logits) <= ROUNDING
    assert verify_adapter(base, per_expert).passed


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("family", MOE)
def test_ours_stacked_computes_the_same_in_stock_peft(family, name, bases, tmp_path):
    model = lora_model(family, OURS[name])
    adapter = saved(model, tmp_path, save_base(family, bases))
    logits = model(token_batch()).logits.detach()
    assert diff(logits, base_logits(family)) > 0.5
    assert diff(peft_logits(family, convert(adapter, "stacked")), logits) <= ROUNDING


def test_stacked_tensors_are_those_that_peft_itself_makes_of_ours(bases, tmp_path):
    adapter = saved(lora_model("mixtral"), tmp_path, save_base("mixtral", bases))
    model = PeftModel.from_pretrained(tiny_model("mixtral"), str(adapter))
    theirs = convert_peft_adapter_state_dict_for_transformers(
        model, model.peft_config["default"], load_file(adapter / WEIGHTS)
    )
    stacked = load_file(convert(adapter, "stacked") / WEIGHTS)
    assert theirs.keys() == stacked.keys()
    assert all(torch.equal(theirs[key], stacked[key]) for key in theirs)


def test_a_transformers_4_adapter_of_deepseek_with_shared_experts_loads_after_conversion(bases, tmp_path):
    base = save_base("deepseek_v3", bases)
    model = lora_model("deepseek_v3")
    older = saved(model, tmp_path, base) / "transformers4"
    logits = model(token_batch()).logits.detach()
    assert diff(peft_logits("deepseek_v3", older), logits) > 0.1  # huggingface/peft#3711: tensors are dropped
    convert_adapter(older, tmp_path / "newer", to="per-expert")
    assert diff(peft_logits("deepseek_v3", tmp_path / "newer"), logits) <= ROUNDING


# --- there and back


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("family", MOE)
def test_ours_comes_back_from_the_other_forms_bit_for_bit(family, name, bases, tmp_path):
    adapter = saved(lora_model(family, OURS[name]), tmp_path, save_base(family, bases))
    edit_tensors(adapter, lambda tensors: tensors.update({k: v.bfloat16() for k, v in tensors.items()}))
    back = convert(convert(convert(adapter, "stacked"), "vllm"), "per-expert")
    assert same_bits(back, adapter)
    for config in ("adapter_config.json", "transformers4/adapter_config.json"):
        assert json.loads((back / config).read_text()) == json.loads((adapter / config).read_text())
    assert same_bits(back / "transformers4", adapter)


@pytest.mark.parametrize("name", ["both", "down alone", "one layer", "odd rank"])
def test_stock_peft_s_comes_back_from_per_expert_bit_for_bit(name, bases, tmp_path):
    base = save_base("deepseek_v3", bases)
    adapter, logits = stock_adapter(tmp_path / "stock", base, family="deepseek_v3", **STOCK[name])
    back = convert(convert(adapter, "per-expert"), "stacked")
    assert same_bits(back, adapter)
    assert diff(peft_logits("deepseek_v3", back), logits) <= ROUNDING


def test_gate_up_alone_comes_back_with_the_down_proj_of_zeros_that_per_expert_needs(bases, tmp_path):
    base = save_base("deepseek_v3", bases)
    adapter, _ = stock_adapter(tmp_path / "stock", base, family="deepseek_v3", **STOCK["gate_up alone"])
    back = load_file(convert(convert(adapter, "per-expert"), "stacked") / WEIGHTS)
    for key, tensor in load_file(adapter / WEIGHTS).items():
        assert torch.equal(back.pop(key.replace(".lora_", ".base_layer.lora_")), tensor)
    assert back and not any(torch.any(tensor) for tensor in back.values())


def test_an_adapter_that_was_never_trained_comes_back_too(stock):
    edit_tensors(stock, lambda tensors: [tensor.zero_() for key, tensor in tensors.items() if "lora_B" in key])
    assert same_bits(convert(convert(stock, "per-expert"), "stacked"), stock)  # zeros are no blocks of gate and up


def test_vllm_form_has_plain_names_and_the_same_tensors(ours):
    vllm = convert(ours, "vllm")
    assert same_bits(vllm, ours)
    assert config_of(vllm) == json.loads((ours / "transformers4/adapter_config.json").read_text())
    assert not (vllm / "transformers4").exists()


def test_rank_and_scaling_of_gate_up_are_stated(ours):
    config = config_of(convert(ours, "stacked"))
    assert config["rank_pattern"] == {r".*\.experts\.gate_up_proj": 8}
    assert config["alpha_pattern"] == {r".*\.experts\.gate_up_proj": 24}
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (4, 12, False)


# --- uneven ranks and scalings


def test_uneven_ranks_and_scalings_are_evened_out_and_told(bases, tmp_path):
    options = {"rank_pattern": {"experts.down_proj": 2}}  # scaling 6 beside 3: an exact factor
    adapter, logits = stock_adapter(tmp_path / "a", save_base("mixtral", bases), family="mixtral", **options)
    report = convert_adapter(adapter, tmp_path / "b", to="vllm")
    assert (report.rank, report.scaling) == (4, 3)
    assert any("lora_B is multiplied by 2 " in note and "exact" in note for note in report.notes)
    assert any("8 LoRAs filled up with zeros to rank 4" in note for note in report.notes)
    before, after = load_file(adapter / WEIGHTS), load_file(tmp_path / "b" / WEIGHTS)
    assert all(torch.equal(after[key], before[key]) for key in before if ".self_attn." in key)
    assert diff(peft_logits("mixtral", tmp_path / "b"), logits) <= ROUNDING


# --- nothing is dropped

EXPERT = "base_model.model.model.layers.1.mlp.experts"
O_PROJ = "base_model.model.model.layers.0.self_attn.o_proj"
DOWN = [("lora_A", (4, 24)), ("lora_B", (32, 4))]


def put(key, *shape):
    return lambda tensors: tensors.update({key: torch.ones(shape)})


def drop(pattern):
    return lambda tensors: [tensors.pop(key) for key in [*tensors] if re.search(pattern, key)]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (put("base_model.model.lm_head.weight", 96, 32), "lm_head.weight' is no LoRA weight"),
        (put(f"{O_PROJ}.lora_magnitude_vector", 32), "lora_magnitude_vector' is no LoRA weight"),
        (put(f"{O_PROJ}.lora_B.bias", 32), "lora_B.bias' is no LoRA weight"),
        (put("base_model.model.model.embed_tokens.lora_embedding_A", 4, 96), "lora_embedding_A' is no LoRA"),
        (put(f"{O_PROJ}x.lora_A.weight", 4, 32), r"o_projx\.lora_B\.weight is missing"),
        (drop(r"0.*o_proj\.lora_A"), r"o_proj\.lora_A\.weight is missing"),
        (drop(r"experts\.7\.up_proj\.lora_B"), r"experts\.7\.up_proj\.lora_B\.weight is missing"),
        (drop(r"experts\.3\.up_proj"), r"no LoRA on up_proj of expert\(s\) \[3\]"),
        (drop("gate_proj"), "no LoRA on gate_proj of expert.*gate_proj and up_proj together"),
        (put(f"{EXPERT}.0.mid_proj.lora_A.weight", 4, 32), "mid_proj.* unknown name"),
        (put(f"{O_PROJ}.lora_A.weight", 4, 31), r"o_proj.* has shape \(4, 31\).*expected \(r, 32\) and \(32, r\)"),
        (put(f"{O_PROJ}.lora_A.weight", 5, 32), r"o_proj.* has shape \(5, 32\)"),
        (lambda tensors: tensors[f"{O_PROJ}.lora_A.weight"].fill_(float("nan")), r"o_proj\.lora_A.* is not finite"),
        (put(f"{EXPERT}.lora_A.weight", 32, 24), "stacked form and in the per-expert form"),
        (put("base_model.model.model.layers.9.mlp.experts.lora_A.weight", 4, 4), "has no routed experts there"),
        (put(f"{EXPERT.replace('mlp', 'block_sparse_moe')}.0.w1.lora_A.weight", 4, 32), "under another name too"),
        (lambda tensors: tensors.clear(), "holds no tensor"),
    ],
)
def test_a_tensor_that_has_no_place_is_an_error(edit, message, ours):
    edit_tensors(ours, edit)
    for to in ("stacked", "vllm", "per-expert"):
        with pytest.raises(ValueError, match=message):
            convert(ours, to)
        assert not ours.with_name(f"adapter-{to}").exists()


def test_an_expert_that_the_base_model_has_not_is_an_error(ours):
    edit_tensors(ours, lambda tensors: [put(f"{EXPERT}.8.down_proj.{k}.weight", *shape)(tensors) for k, shape in DOWN])
    with pytest.raises(ValueError, match=r"experts\.8\.down_proj.*the base model has 8 experts there"):
        convert(ours, "stacked")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop(r"1\.mlp\.experts\.lora_B"), r"layers\.1\.mlp\.experts has .*make it"),
        (put(f"{EXPERT}.base_layer.base_layer.lora_A.weight", 16, 32), "base_layer.base_layer"),
        (
            put(f"{EXPERT}.lora_A.weight", 15, 24),
            r"down_proj has lora_A \(15, 24\).*expected.*\(4r, 24\) and \(32, 4r\)",
        ),
        (put(f"{EXPERT}.lora_A.weight", 16, 25), "another base model"),
    ],
)
def test_a_stacked_tensor_that_has_no_place_is_an_error(edit, message, stock):
    edit_tensors(stock, edit)
    with pytest.raises(ValueError, match=message):
        convert(stock, "per-expert")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "not supported: {'use_dora': True}"),
        ({"bias": "all"}, "not supported: {'bias': 'all'}"),
        ({"lora_bias": True}, "'lora_bias': True"),
        ({"modules_to_save": ["lm_head"]}, "'modules_to_save': .*lm_head"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' changes the base weights"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters"),
        ({"r": 8}, "has rank 4, but adapter_config.json and the base model make it 8"),
        ({"base_model_name_or_path": "no/such-model"}, "no/such-model cannot be read.*--pretrained"),
        ({"base_model_name_or_path": None}, "names no base model.*--pretrained"),
    ],
)
def test_a_config_that_cannot_be_converted_is_refused_by_name(change, message, stock):
    edit_config(stock, **change)
    with pytest.raises(ValueError, match=message):
        convert(stock, "per-expert")


def test_an_adapter_of_another_base_is_refused(stock, bases):
    with pytest.raises(ValueError, match=r"gate_up_proj has rank 2, but .* the base model make it 4"):
        convert(stock, "per-expert", pretrained=save_base("qwen3_moe", bases))  # twice the experts


# --- the directory and the command


def test_an_existing_output_is_kept_unless_told_and_then_replaced_whole(ours, stock):
    output = convert(ours, "per-expert")
    with pytest.raises(ValueError, match=r"is there already.*--overwrite"):
        convert_adapter(stock, output, to="vllm")
    assert same_bits(output, ours)
    convert_adapter(stock, output, to="stacked", overwrite=True)
    assert same_bits(output, stock)
    assert not (output / "transformers4").exists()  # it would be a config of other tensors


def test_the_adapter_itself_is_never_the_output(ours):
    for inside in (ours, ours.parent):
        with pytest.raises(ValueError, match="holds the adapter that is read"):
            convert_adapter(ours, inside, to="vllm", overwrite=True)
    convert_adapter(ours, ours / "stacked", to="stacked")  # below it is fine


def test_the_tokenizer_comes_along(ours):
    write_json(ours / "tokenizer_config.json", {"chat_template": "x"})
    (ours / "optimizer.pt").write_bytes(b"large")
    stacked = convert(ours, "stacked")
    assert sorted(f.name for f in stacked.iterdir()) == ["adapter_config.json", WEIGHTS, "tokenizer_config.json"]


def test_the_command_tells_errors_in_one_line(ours, tmp_path):
    edit_tensors(ours, put(f"{O_PROJ}.lora_magnitude_vector", 32))
    command = [sys.executable, "applications/convert_adapter.py", "--adapter", str(ours), "--to", "vllm", "--output"]
    done = subprocess.run([*command, str(tmp_path / "o")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("convert_adapter: error: ") and "lora_magnitude_vector" in line
    assert not (tmp_path / "o").exists()
