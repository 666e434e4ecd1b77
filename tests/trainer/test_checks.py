import pytest
import torch
from tiny_models import tiny_model

from coati_ext.checkpoint_io.checkpoint import read_checkpoint
from coati_ext.cli import build_config
from coati_ext.config import FinetuneConfig
from coati_ext.trainer.checks import check_states, choose_lora, what_is_saved
from coati_ext.utils.preflight import check_output_is_free
from tests.checkpoint_io.adapters import lora_model, saved


def config_of(**flags):
    return build_config(FinetuneConfig, {"pretrained": "base", "dataset": "d", "plugin": "moe", **flags})


@pytest.mark.parametrize("targets", [["q_porj"], ["gate"], ["("], ["gate_proj"]])
def test_an_error_of_the_targets_names_the_flag(targets):
    with pytest.raises(ValueError, match=r"^--lora_targets: "):
        choose_lora(config_of(lora_rank=4, lora_targets=targets), tiny_model("mixtral"))


def test_an_adapter_to_go_on_from_gives_rank_alpha_and_targets(tmp_path):
    adapter = saved(lora_model("mixtral", "attention"), tmp_path)
    model = tiny_model("mixtral")
    lora, targets = choose_lora(config_of(init_adapter=str(adapter), lora_dropout=0.25), model)
    assert (lora.r, lora.lora_alpha, lora.lora_dropout) == (4, 12, 0.25)
    assert {target.kind for target in targets} == {"attention"}
    same, _ = choose_lora(config_of(init_adapter=str(adapter), lora_targets=["attention"]), model)
    assert same.target_modules == lora.target_modules
    with pytest.raises(ValueError, match=r"--lora_targets is not what --init_adapter .* has, e.g. model.layers.0.mlp"):
        choose_lora(config_of(init_adapter=str(adapter), lora_targets=["all"]), model)
    with pytest.raises(ValueError, match=r"--init_adapter .*LlamaForCausalLM has no place"):
        adapter = saved(lora_model("mixtral", "experts"), tmp_path)
        choose_lora(config_of(init_adapter=str(adapter)), tiny_model("llama"))


def test_states_without_resume_and_resume_without_states_are_refused(tmp_path):
    run, empty = tmp_path / "run", tmp_path / "empty"
    (run / "checkpoints" / "step-00000003").mkdir(parents=True)
    empty.mkdir()
    with pytest.raises(ValueError, match=r"states of an earlier run \(step-00000003\): go on with --resume latest"):
        check_output_is_free(config_of(save_dir=str(run)))
    with pytest.raises(ValueError, match=r"--resume .*empty: no state of a training"):
        check_states(config_of(save_dir=str(run), resume=str(empty)).output)
    check_states(config_of(save_dir=str(empty)).output)
    for resume in ("latest", str(run), str(run / "checkpoints" / "step-00000003")):
        check_states(config_of(save_dir=str(run), resume=resume).output)


def test_sizes_of_an_adapter_and_its_states(tmp_path):
    def sizes(**flags):
        config = config_of(lora_rank=4, save_dir=str(tmp_path), **flags)
        return [(s.nbytes, s.largest_file) for s in what_is_saved(config, 100, torch.bfloat16, None, 2)]

    assert sizes() == [(200, 200)]
    assert sizes(save_interval=5, keep_last=2) == [(200, 200), (3 * 1200, 600)]
    assert sizes(save_interval=5, max_steps=9) == [(200, 200), (1200, 600)]
    assert sizes(save_interval=5, max_steps=4) == [(200, 200)]
    (tmp_path / "checkpoints" / "step-00000003").mkdir(parents=True)  # will be deleted for a new one
    assert sizes(save_interval=5, keep_last=2)[1] == (2 * 1200, 600)


def test_the_size_of_a_model_is_that_of_its_files(tmp_path):
    model = tiny_model("mixtral")
    model.save_pretrained(tmp_path)
    config = config_of(lora_rank=0, save_dir=str(tmp_path / "run"))
    (saved_model,) = what_is_saved(config, 1, torch.float32, read_checkpoint(tmp_path), 1)
    assert saved_model.nbytes == saved_model.largest_file == sum(p.nbytes for p in model.parameters())
