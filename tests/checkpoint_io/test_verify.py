"""`verify` passes what stock PEFT computes exactly, and fails on every fault that PEFT itself keeps silent about."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import tiny_model

from applications import verify_adapter as application
from coati_ext.checkpoint_io.verify import VerifyReport, probe_tokens, verify_adapter
from tests.checkpoint_io.adapters import WEIGHTS, edit_config, edit_tensors, lora_model, save_base, saved

ROOT = Path(__file__).resolve().parents[2]

# As in test_adapter: rounding of fp32 with logits of about 5.
ROUNDING = 1e-5

CASES = [
    ("mixtral", "all", "two layers, Mixtral's names"),
    ("qwen3_moe", "mlp", "experts only in effect"),
    ("deepseek_v3", "all", "shared experts, a dense layer, MLA"),
    ("deepseek_v3", "experts", "routed experts alone"),
    ("deepseek_v3", "attention", "no target_parameters"),
    ("deepseek_v3", r"model\.layers\.2\..*", "one layer"),
    ("deepseek_v3", r".*\.mlp\.experts\.down_proj", "one wrapper instead of two"),
    ("llama", "all", "dense"),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """family -> (base, adapter), made once; tests that edit take `copy_of`."""
    folder = tmp_path_factory.mktemp("verify")

    def make(family: str) -> tuple[str, Path]:
        base, adapter = save_base(family, folder), folder / f"{family}-adapter"
        if not adapter.exists():
            saved(lora_model(family), folder, base).rename(adapter)
        return base, adapter

    return make


@pytest.fixture
def copy_of(made, tmp_path):
    def copy(family: str) -> tuple[str, Path]:
        base, adapter = made(family)
        return base, Path(shutil.copytree(adapter, tmp_path / "adapter", symlinks=True))

    return copy


@pytest.mark.parametrize(("family", "targets", "why"), CASES)
def test_a_good_adapter_passes_with_every_tensor_applied(family, targets, why, made, tmp_path):
    base, _ = made(family)
    model = lora_model(family, targets)
    report = verify_adapter(base, saved(model, tmp_path, base))
    assert report.passed, report.format()
    num_tensors = len(load_file(tmp_path / "adapter" / WEIGHTS))
    assert report.tensors_in_file == report.tensors_applied == num_tensors
    assert report.max_logit_diff <= ROUNDING
    assert report.adapter_effect > 0.5
    assert "PASS" in report.format() and "FAIL" not in report.format()


def test_bf16_passes_too(made):
    base, adapter = made("mixtral")
    report = verify_adapter(base, adapter, dtype=torch.bfloat16)
    assert report.passed, report.format()


def _first_key(tensors, part):
    return next(key for key in sorted(tensors) if part in key)


def _delete_pair(tensors):
    for factor in ("lora_A", "lora_B"):
        tensors.pop(_first_key(tensors, f"layers.2.self_attn.o_proj.{factor}"))


def _rename_pair(tensors):
    for factor in ("lora_A", "lora_B"):
        key = _first_key(tensors, f"layers.2.self_attn.o_proj.{factor}")
        tensors[key.replace("o_proj", "out_proj")] = tensors.pop(key)


def _spoil(tensors):
    tensors[_first_key(tensors, "experts.7.up_proj.lora_B")][3, 1] = float("nan")


FAULTS = {
    "a tensor of an expert is gone": (
        lambda t: t.pop(_first_key(t, "layers.1.mlp.experts.5.up_proj.lora_B")),
        r"experts\.5\.up_proj\.lora_A\.weight has no partner",
    ),
    "a pair is gone": (
        _delete_pair,
        r"2 tensor\(s\) expected by PEFT, not in the file: .*layers\.2\.self_attn\.o_proj",
    ),
    "a pair has another name": (_rename_pair, r"2 tensor\(s\) dropped by PEFT.*layers\.2\.self_attn\.out_proj"),
    "an extra tensor": (
        lambda t: t.update({"base_model.model.lm_head.weight": torch.zeros(2, 2)}),
        r"'base_model\.model\.lm_head\.weight' is no LoRA weight",
    ),
    "NaN": (_spoil, r"1 tensor\(s\) hold NaN or infinity: .*experts\.7\.up_proj\.lora_B"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_file_fails_with_its_name(fault, copy_of):
    edit, reason = FAULTS[fault]
    base, adapter = copy_of("deepseek_v3")
    edit_tensors(adapter, edit)
    report = verify_adapter(base, adapter)
    assert not report.passed
    assert re.search(reason, report.format()), report.format()


def test_the_plain_form_on_deepseek_fails_and_names_what_peft_drops(made):
    """huggingface/peft#3711: shared experts and dense layers, dropped without an error."""
    base, adapter = made("deepseek_v3")
    report = verify_adapter(base, adapter / "transformers4")
    assert not report.passed
    dropped = {key.rpartition(".lora_")[0].removeprefix("base_model.model.") for key in report.tensors_missing}
    projections = ("gate_proj", "up_proj", "down_proj")
    assert dropped == {
        *(f"model.layers.0.mlp.{p}" for p in projections),
        *(f"model.layers.{i}.mlp.shared_experts.{p}" for i in (1, 2) for p in projections),
    }
    assert report.max_logit_diff > 0.5


def test_the_plain_form_on_mixtral_passes(made):
    base, adapter = made("mixtral")
    assert verify_adapter(base, adapter / "transformers4").passed


def test_a_lost_rank_pattern_fails(copy_of):
    base, adapter = copy_of("mixtral")
    edit_config(adapter, rank_pattern={}, alpha_pattern={})
    report = verify_adapter(base, adapter)
    assert not report.passed
    assert "stock PEFT cannot load it" in report.format()


def test_a_lost_alpha_pattern_fails_on_the_experts_that_it_scaled(copy_of):
    base, adapter = copy_of("mixtral")
    edit_config(adapter, alpha_pattern={})
    report = verify_adapter(base, adapter)
    assert not report.passed
    assert len(report.tensors_mismatched) == 2 * 4 * 4  # layers, experts, A and B of gate and of up
    assert all(".w1." in key or ".w3." in key for key in report.tensors_mismatched)


def test_dropout_fails_with_pefts_reason(copy_of):
    base, adapter = copy_of("mixtral")
    edit_config(adapter, lora_dropout=0.1)
    assert "does not work with lora_dropout" in verify_adapter(base, adapter).format()


def test_swapped_experts_fail_though_no_token_may_visit_them(copy_of, monkeypatch):
    """Weights are checked expert by expert: here PEFT is made to misplace two, as fused layouts once did."""
    from peft.tuners.lora.layer import ParamWrapper

    base, adapter = copy_of("qwen3_moe")
    right = ParamWrapper.get_delta_weight
    monkeypatch.setattr(ParamWrapper, "get_delta_weight", lambda self, name: right(self, name).flip(0))
    report = verify_adapter(base, adapter, token_ids=[[5]])
    assert not report.passed
    assert len([key for key in report.tensors_mismatched if ".experts." in key]) == 2 * 8 * 3 * 2  # all of them


def test_an_adapter_without_effect_fails(copy_of):
    base, adapter = copy_of("mixtral")
    edit_tensors(adapter, lambda t: [tensor.zero_() for key, tensor in t.items() if "lora_B" in key])
    report = verify_adapter(base, adapter)
    assert not report.passed
    assert "no effect on the logits" in report.format()
    assert report.num_untrained_pairs == report.tensors_in_file // 2


def test_an_expert_that_got_no_token_is_reported_and_passes(copy_of):
    base, adapter = copy_of("mixtral")
    edit_tensors(adapter, lambda t: [tensor.zero_() for key, tensor in t.items() if "experts.3.w1.lora_B" in key])
    report = verify_adapter(base, adapter)
    assert report.passed
    assert report.num_untrained_pairs == 2
    assert "untrained 2 pair(s)" in report.format()


def test_padding_is_told_apart_from_untrained(made, tmp_path):
    base, _ = made("mixtral")
    model = lora_model("mixtral", [r".*\.mlp\.experts\.gate_proj", r".*\.mlp\.experts\.up_proj"])
    report = verify_adapter(base, saved(model, tmp_path, base))
    assert report.passed
    assert (report.num_padding_pairs, report.num_untrained_pairs) == (8, 0)


def test_logits_beyond_the_tolerance_fail(made):
    base, adapter = made("mixtral")
    report = verify_adapter(base, adapter, tolerance=1e-12)
    assert not report.passed
    assert "more than 1e-12" in report.format()


def test_a_nan_difference_does_not_pass():
    report = VerifyReport(adapter="a", pretrained="b", max_logit_diff=float("nan"), tolerance=1.0, adapter_effect=1.0)
    assert not report.passed


def test_probe_tokens_are_valid_for_the_model():
    tokens = probe_tokens(tiny_model("mixtral").config)
    assert len({len(ids) for ids in tokens}) > 2
    assert all(0 <= token < 96 for ids in tokens for token in ids)
    short = tiny_model("llama", max_position_embeddings=8).config
    assert max(len(ids) for ids in probe_tokens(short)) == 8


def test_the_peft_warning_that_is_wrong_does_not_reach_the_user(made, recwarn):
    verify_adapter(*made("mixtral"))
    assert [str(w.message) for w in recwarn if "rank_pattern" in str(w.message)] == []


# --- the command


def _run(capsys, *args):
    status = application.main([str(arg) for arg in args])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_command_ends_with_0_and_writes_json(made, tmp_path, capsys):
    base, adapter = made("mixtral")
    status, out, _ = _run(capsys, "--pretrained", base, "--adapter", adapter, "--json", tmp_path / "r.json")
    assert status == 0 and "PASS" in out
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["passed"] is True and written["tensors_missing"] == []


def test_the_command_ends_with_1_on_a_failed_check(made, capsys):
    base, adapter = made("deepseek_v3")
    status, out, _ = _run(capsys, "--pretrained", base, "--adapter", adapter / "transformers4")
    assert status == 1 and "FAIL" in out and "PASS" not in out


@pytest.mark.parametrize(
    ("pretrained", "adapter", "reason"),
    [
        ("{tmp}/nothing", "{adapter}", "is no directory"),
        ("{tmp}", "{adapter}", "config.json cannot be read"),
        ("{base}", "{tmp}/nothing", "is not there"),
        ("{base}", "{base}", "is no adapter directory"),
        ("{llama}", "{adapter}", "another architecture"),
    ],
)
def test_what_the_user_got_wrong_is_one_line(pretrained, adapter, reason, made, tmp_path, capfd):
    base, good = made("deepseek_v3")
    names = {"tmp": tmp_path, "base": base, "adapter": good, "llama": made("llama")[0]}
    capfd.readouterr()
    status = application.main(["--pretrained", pretrained.format(**names), "--adapter", adapter.format(**names)])
    err = capfd.readouterr().err
    said = [line for line in err.splitlines() if line and "Loading weights" not in line]
    assert status == 1
    assert len(said) == 1 and reason in said[0], err


def test_another_size_of_the_same_architecture_fails_with_the_tensor(made, tmp_path):
    base = tmp_path / "wider"
    tiny_model("mixtral", hidden_size=64).save_pretrained(base)
    report = verify_adapter(base, made("mixtral")[1])
    assert not report.passed
    assert re.search(r"lora_A\.weight has shape \(4, 32\), this model's LoRA needs \(4, 64\)", report.format())


def test_help_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; from applications.verify_adapter import main; main(['--help'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "--pretrained" in done.stdout


def test_a_report_lists_few_names_and_keeps_all():
    report = VerifyReport(adapter="a", pretrained="b", tensors_missing=[f"tensor{i}" for i in range(9)])
    assert "tensor0, tensor1 and 7 more" in report.format()
    assert len(report.to_dict()["tensors_missing"]) == 9
