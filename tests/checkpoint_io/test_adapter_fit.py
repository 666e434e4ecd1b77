import pytest
import torch
from tiny_models import CONFIGS, tiny_model
from transformers import AutoModelForCausalLM

from coati_ext.checkpoint_io.adapter_fit import check_adapter_fits
from tests.checkpoint_io.adapters import edit_tensors, lora_model, saved

EXPERT = "base_model.model.model.layers.1.block_sparse_moe.experts.3.w1.lora_A.weight"


def meta_model(family):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIGS[family]())


@pytest.mark.parametrize("targets", ["all", "experts", ["gate_proj", "up_proj"]])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "llama"])
def test_an_adapter_fits_its_own_model(family, targets, tmp_path):
    if family == "llama" and targets == "experts":
        targets = "mlp"
    check_adapter_fits(meta_model(family), saved(lora_model(family, targets), tmp_path))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(EXPERT), "has 7 of the 8 tensors of model.layers.1.mlp.experts.gate_proj"),
        (
            lambda t: t.update({EXPERT.replace("rts.3", "rts.4"): t[EXPERT] + 1}),
            "of an expert that is not there: .* has 4",
        ),
        (lambda t: t.update({EXPERT.replace("layers.1", "layers.2"): t[EXPERT] + 1}), "has no place for .*layers.2"),
        (lambda t: t.update({EXPERT: torch.ones(4, 31)}), r"w1.lora_A.weight has shape \[4, 31\], .* is 32 wide"),
        (
            lambda t: t.update({EXPERT.replace("A", "B"): torch.ones(23, 4)}),
            r"lora_B.* has shape \[23, 4\], .* 24 wide",
        ),
    ],
)
def test_a_tensor_that_is_missing_or_does_not_fit_is_named(edit, message, tmp_path):
    adapter = saved(lora_model("mixtral"), tmp_path)
    edit_tensors(adapter, edit)
    with pytest.raises(ValueError, match=rf"adapter_model.safetensors.*{message}"):
        check_adapter_fits(meta_model("mixtral"), adapter)


def test_another_model_s_adapter_is_refused(tmp_path):
    adapter = saved(lora_model("mixtral"), tmp_path)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no place for .*; is it another model's adapter"):
        check_adapter_fits(tiny_model("llama"), adapter)
