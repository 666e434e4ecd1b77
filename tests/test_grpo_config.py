"""Flags, recipes and the LoRA file of `applications/train_grpo.py`."""

import json
import subprocess
import sys

import pytest

from coati_ext import grpo_config
from coati_ext.cli import make_parser, parse_config
from coati_ext.config import flatten_config
from coati_ext.grpo_config import GRPOConfig
from coati_ext.models import advantages, aggregation, importance, policy_loss

REQUIRED = ["-m", "base", "--prompt_dataset", "p.jsonl", "--reward_functions", "number", "--lora_rank", "8"]


def parse(*argv):
    return parse_config(GRPOConfig, "test", [*REQUIRED, *argv])


def error_of(*argv) -> str:
    with pytest.raises(ValueError) as caught:
        parse(*argv)
    return str(caught.value)


def test_choices_that_are_written_without_torch_are_those_of_the_code():
    assert tuple(policy_loss.LOSSES) == grpo_config.LOSSES
    assert tuple(advantages.ADVANTAGES) == grpo_config.ADVANTAGES
    assert tuple(aggregation.AGGREGATIONS) == grpo_config.AGGREGATIONS
    assert tuple(policy_loss.KL_KINDS) == grpo_config.KL_KINDS
    assert grpo_config.IMPORTANCE_KINDS == importance.IMPORTANCE_KINDS


def test_the_config_is_read_without_torch():
    loaded = "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    code = f"import sys, coati_ext.grpo_config, coati_ext.cli; {loaded}"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.stdout.strip() == "[]", process.stdout + process.stderr


def test_defaults():
    flat = flatten_config(parse())
    expected = {
        "plugin": "zero2", "num_collect_steps": 1, "num_update_steps": 1, "train_batch_size": 8,
        "experience_batch_size": 16, "num_generations": 8, "inference_batch_size": 128,
        "logits_forward_batch_size": 16, "initial_temperature": 1.0, "kl_coef": 0.0, "ptx_coef": 0.0,
        "ptx_batch_size": 4, "save_dir": "actor_checkpoint_prompts", "config_file": "training_config.json",
        "max_length": 2048, "max_seq_len": 256, "seed": 42, "dynamic_sampling_rounds": 0, "loss": "grpo",
    }  # fmt: skip
    assert {key: flat[key] for key in expected} == expected
    assert (flat["final_temperature"], flat["lr"], flat["importance"]) == (1.0, 1e-5, "auto")


def test_the_learning_rate_is_lower_for_all_weights():
    full = parse_config(GRPOConfig, "test", [*REQUIRED[:-2], "--lora_rank", "0"])
    assert full.train.lr == 1e-6 and not full.trains_adapter
    assert parse("--lr", "3e-4").train.lr == 3e-4


@pytest.mark.parametrize("alias", GRPOConfig.ALIASES)
def test_colossalchats_spelling_is_the_same_flag_and_the_same_key(alias, tmp_path):
    name = GRPOConfig.ALIASES[alias]
    switch = name == "use_grad_checkpoint"
    base = REQUIRED[2:] if name == "pretrained" else REQUIRED
    argv = [*base, f"--{alias}", *([] if switch else ["somewhere"])]
    expected = True if switch else "somewhere"
    assert flatten_config(parse_config(GRPOConfig, "test", argv))[name] == expected
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({alias: expected}))
    assert flatten_config(parse_config(GRPOConfig, "test", [*base, "--config", str(recipe)]))[name] == expected
    recipe.write_text(json.dumps({alias: expected, name: expected}))
    with pytest.raises(ValueError, match=f"{alias} and {name} are the same; give one"):
        parse_config(GRPOConfig, "test", [*base, "--config", str(recipe)])


def test_aliases_are_shown_in_the_help():
    text = make_parser(GRPOConfig, "test").format_help()
    for alias, name in GRPOConfig.ALIASES.items():
        assert f"--{alias}" in text and f"--{name}" in text


def test_a_saved_config_is_a_recipe_that_gives_the_same_config(tmp_path):
    lora = tmp_path / "lora.json"
    lora.write_text(json.dumps({"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}))
    flags = ["--lora_config", str(lora), "--final_temperature", "0.7", "--reward_options", "extraction=flexible"]
    config = parse_config(GRPOConfig, "test", [*REQUIRED[:-2], *flags, "--reward_weights", "2"])
    saved = tmp_path / "training_config.json"
    saved.write_text(json.dumps(flatten_config(config)))
    lora.unlink()
    assert parse_config(GRPOConfig, "test", ["--config", str(saved)]) == config


def test_an_unknown_key_of_a_recipe_is_named_with_the_nearest(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("num_generation: 4\n")
    assert f"--config {recipe}: unknown key 'num_generation'; did you mean 'num_generations'?" in error_of(
        "--config", str(recipe)
    )
    assert "unknown argument '--num_generation'" in error_of("--num_generation", "4")


def test_an_episode_has_the_steps_that_its_rows_make():
    plan = ["--experience_batch_size", "3", "--num_generations", "5", "--num_collect_steps", "2"]  # 30 rows
    assert parse(*plan).steps_per_episode == 1
    assert parse(*plan, "--num_update_steps", "3").steps_per_episode == 3
    assert parse(*plan, "--train_batch_size", "4", "--accumulation_steps", "2").steps_per_episode == 4


# --- the LoRA file of ColossalChat


COLOSSALCHATS_LORA = {
    "r": 128,
    "embedding_lora_dropout": 0.0,
    "lora_alpha": 32,
    "lora_dropout": 0.0,
    "lora_train_bias": "none",
    "lora_initialization_method": "kaiming_uniform",
    "target_modules": ["q_proj", "o_proj"],
}


def with_lora(tmp_path, values, *argv):
    file = tmp_path / "lora.json"
    file.write_text(values if isinstance(values, str) else json.dumps(values))
    return parse_config(GRPOConfig, "test", [*REQUIRED[:-2], "--lora_config", str(file), *argv])


def test_colossalchats_lora_file_is_taken(tmp_path):
    lora = with_lora(tmp_path, COLOSSALCHATS_LORA).lora
    assert (lora.lora_rank, lora.lora_alpha, lora.lora_targets) == (128, 32, ["q_proj", "o_proj"])
    assert lora.lora_config is None  # it is in the flags now


def test_a_single_target_may_be_a_text(tmp_path):
    assert with_lora(tmp_path, {"r": 2, "target_modules": "all-linear"}).lora.lora_targets == ["all-linear"]


@pytest.mark.parametrize(
    ("values", "argv", "message"),
    [
        ("{", [], "lora.json: Expecting property name"),
        ("[1]", [], "expected a JSON object with r"),
        ({"lora_alpha": 3}, [], "expected a JSON object with r"),
        ({"r": 8, "ranks": 3}, [], "unknown key 'ranks'; known are r, lora_alpha"),
        ({"r": "8"}, [], "r is '8'; expected int"),
        ({"r": True}, [], "r is True; expected int"),
        ({"r": 8, "target_modules": 3}, [], "target_modules is 3; expected list"),
        ({"r": 8, "lora_train_bias": "all"}, [], "lora_train_bias is 'all'; only 'none' is supported"),
        ({"r": 8, "embedding_lora_dropout": 0.1}, [], "embedding_lora_dropout is 0.1; only 0.0"),
        ({"r": 8, "lora_initialization_method": "PiSSA"}, [], "lora_initialization_method is 'PiSSA'; only"),
        ({"r": 8, "lora_dropout": 0.1}, [], "--lora_dropout 0.1: the policy that is trained must be the one"),
        ({"r": 8}, ["--lora_rank", "4"], "--lora_rank and --lora_config"),
        ({"r": -1}, [], "--lora_rank must be at least 0"),
    ],
)
def test_a_lora_file_that_is_not_one_is_refused(tmp_path, values, argv, message):
    with pytest.raises(ValueError) as caught:
        with_lora(tmp_path, values, *argv)
    assert message in str(caught.value)


def test_a_lora_file_that_is_missing_is_named():
    assert "--lora_config no/such.json: " in error_of("--lora_config", "no/such.json")


# --- what is refused


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max_length", "256"], "--max_length 256 leaves no room for a prompt beside --max_seq_len 256"),
        (["--max_seq_len", "0"], "--max_seq_len must be at least 1"),
        (["--max_tokens_thinking", "5"], "--max_tokens_thinking: "),
        (["--disable_loss_mask"], "--disable_loss_mask: "),
        (["--num_generations", "1"], "--num_generations 1: a completion is compared with the others"),
        (["--initial_temperature", "0"], "--initial_temperature must be above 0"),
        (["--final_temperature", "-1"], "--final_temperature must be above 0"),
        (["--top_p", "0"], "--top_p must lie in (0, 1]"),
        (["--top_k", "-1"], "--top_k must be at least 0"),
        (["--eval_samples", "4"], "--eval_interval and --eval_samples need --eval_dataset"),
        (["--reward_weights", "1", "2"], "--reward_weights has 2 numbers for 1 rewards"),
        (["--reward_options", "format_score"], "--reward_options takes KEY=VALUE"),
        (["--reward_options", "a=1", "a=2"], "--reward_options has a twice"),
        (["--rm_checkpoint_path", "x"], "--rm_checkpoint_path needs --rm_pretrain"),
        (["--loss", "ppo"], "--loss: invalid choice: 'ppo'"),
        (["--kl_coef", "-1"], "--kl_coef must be at least 0"),
        (["--kl_coef", "inf"], "--kl_coef must be at least 0"),
        (["--ptx_coef", "1.5"], "--ptx_coef must lie in [0, 1]"),
        (["--ptx_coef", "0.5"], "--ptx_coef above 0 and --ptx_dataset go together"),
        (["--ptx_dataset", "x"], "--ptx_coef above 0 and --ptx_dataset go together"),
        (["--importance_cap", "1"], "--importance_cap must be above 1"),
        (["--lora_rank", "0", "--kl_coef", "0.1"], "--kl_coef 0.1: the reference is the model without its adapter"),
        (["--lora_dropout", "0.1"], "--lora_dropout 0.1: "),
        (["--loss", "rloo", "--num_update_steps", "2"], "--loss rloo is right for one optimizer step"),
        (["--loss", "rloo", "--accumulation_steps", "1"], "--loss rloo is right for one optimizer step"),
        (["-p", "moe", "--pp", "2"], "--pp 2: completions cannot be drawn over pipeline stages"),
        (["-p", "gemini"], "--plugin gemini shares out every weight"),
        (["-p", "3d", "--tp", "2", "--enable_sequence_parallelism"], "--enable_sequence_parallelism: "),
        (["--num_episodes", "0"], "--num_episodes must be at least 1"),
        (["--log_samples_interval", "-1"], "--log_samples_interval must be at least 0"),
        (["--lr", "0"], "--lr must be positive"),
        (["--lr", "nan"], "--lr must be positive"),
        (["--lr", "inf"], "--lr must be positive"),
        (["--grad_clip", "nan"], "--grad_clip must be at least 0"),
        (["--rm_weight", "nan"], "--rm_weight must be finite"),
    ],
)
def test_what_cannot_be_right_is_refused_by_its_flag(argv, message):
    assert message in error_of(*argv)


def test_a_run_needs_prompts_and_a_reward():
    for left_out, message in (("--prompt_dataset", "--prompt_dataset is required"), ("--reward_functions", "required")):
        place = REQUIRED.index(left_out)
        with pytest.raises(ValueError, match=message):
            parse_config(GRPOConfig, "test", REQUIRED[:place] + REQUIRED[place + 2 :])
