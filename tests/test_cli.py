import json
import subprocess
import sys

import pytest

from coati_ext.cli import build_config, make_parser, parse_config
from coati_ext.config import FinetuneConfig, flatten_config

REQUIRED = ["-m", "base", "-d", "data.jsonl", "-p", "moe", "--lora_rank", "8"]


def parse(*argv):
    return parse_config(FinetuneConfig, "test", [*REQUIRED, *argv])


def test_defaults_are_those_of_colossalais_script():
    flat = flatten_config(parse())
    upstream = {
        "save_dir": "checkpoint_dir", "num_epochs": 1, "accumulation_steps": 1, "batch_size": 2, "lr": 3e-4,
        "max_length": 8192, "grad_clip": 1.0, "weight_decay": 0.1, "warmup_steps": None, "use_grad_checkpoint": False,
        "use_flash_attn": False, "tp": 1, "pp": 1, "sp": 1, "ep": 1, "zero_stage": 1, "sp_mode": "split_gather",
        "enable_sequence_parallelism": False, "zero_cpu_offload": False, "microbatch_size": 1, "lora_alpha": 8,
        "config_file": "training_config.json",
    }  # fmt: skip
    assert {key: flat[key] for key in upstream} == upstream


def test_short_flags_lists_and_switches():
    flat = flatten_config(parse("-n", "3", "-g", "--lora_targets", "experts", "attention", "--lr", "1e-4"))
    assert (flat["num_epochs"], flat["use_grad_checkpoint"], flat["lr"]) == (3, True, 1e-4)
    assert flat["lora_targets"] == ["experts", "attention"]


def test_flags_override_the_recipe_and_the_recipe_the_defaults(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("lr: 1e-5\nbatch_size: 7\nuse_grad_checkpoint: true\nlora_targets: [attention]\n")
    flat = flatten_config(parse("--config", str(recipe), "--batch_size", "3", "--no-use_grad_checkpoint"))
    assert (flat["lr"], flat["batch_size"], flat["use_grad_checkpoint"]) == (1e-5, 3, False)
    assert flat["lora_targets"] == ["attention"]


def test_a_saved_config_is_a_recipe_that_gives_the_same_config(tmp_path):
    config = parse("--ep", "2", "--max_steps", "5")
    saved = tmp_path / "training_config.json"
    saved.write_text(json.dumps(flatten_config(config)))
    assert parse_config(FinetuneConfig, "test", ["--config", str(saved)]) == config


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--lora_rnk", "4"], "unknown argument '--lora_rnk'; did you mean '--lora_rank'"),
        (["--lora_rank", "many"], "--lora_rank: invalid int value: 'many'"),
        (["--lora_rank", "-1"], "--lora_rank must be at least 0"),
        (["--frozen_dtype", "fp8", "--lora_rank", "0"], "--frozen_dtype fp8 needs LoRA"),
        (["--fp8_compute"], "--fp8_compute multiplies weights that are kept in FP8: it needs --frozen_dtype fp8"),
        (["-p", "zero2", "--pp", "2"], "--pp 2 needs --plugin moe or 3d"),
        (["-p", "ddp", "--ep", "2"], "--ep 2 needs --plugin moe or 3d; ddp is data parallel only"),
        (["--pp", "2", "--zero_stage", "2"], "--zero_stage 2 with --pp 2"),
        (["--pp", "2", "--num_layers_per_stage", "3"], "--num_layers_per_stage takes --pp 2 numbers"),
        (
            ["--pp", "2", "--num_layers_per_stage", "3", "0"],
            "--num_layers_per_stage takes --pp 2 numbers of at least 1",
        ),
        (["--num_layers_per_stage", "three"], "invalid int value"),
        (["--microbatch_size", "2"], "--microbatch_size 2 needs --pp above 1"),
        (["--pp", "2", "--microbatch_size", "3"], "--microbatch_size 3 is more than the rows of --batch_size 2$"),
        (["--pp", "2", "--microbatch_size", "3", "--packing"], "--batch_size 2, and --packing makes fewer"),
        (["--sp", "2"], "--sp above 1, --enable_sequence_parallelism and --sp_mode all_to_all go together"),
        (["--tp", "2", "--enable_sequence_parallelism", "--sp_mode", "ring"], "--sp_mode ring gives wrong gradients"),
        (["--sp_mode", "ring"], "--sp_mode ring gives wrong gradients"),
        (["--enable_sequence_parallelism"], "split_gather needs --tp above 1"),
        (["--torch_compile", "--plugin", "3d", "--tp", "2"], "--torch_compile with --tp 2: layers that communicate"),
        (["-p", "gemini", "--lora_rank", "0", "--torch_compile"], "--torch_compile does not go with --plugin gemini"),
        (["-p", "gemini"], "--plugin gemini cannot train LoRA in colossalai"),
        (["-p", "gemini_auto", "--lora_rank", "0", "--resume", "latest"], "cannot save states to resume from"),
        (["--keep_last", "0"], "--keep_last must be at least 1"),
        (["--lr", "-1"], "--lr must be positive"),
        (["--ep", "0"], "--ep must be at least 1"),
        (["--lora_dropout", "1"], "--lora_dropout must lie in"),
        (["--config", "no-such.yaml"], "--config no-such.yaml"),
    ],
)
def test_a_wrong_flag_is_refused_by_name(argv, message):
    with pytest.raises(ValueError, match=message):
        parse(*argv)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lerning_rate: 1", "unknown key 'lerning_rate'"),
        ("batchsize: 1", "did you mean 'batch_size'"),
        ("- lr", "expected a mapping"),
        ("lr: [", "parsing"),
        ("batch_size: two", "--batch_size: expected int, got 'two'"),
        ("ep: true", "--ep: expected int, got True"),
    ],
)
def test_a_wrong_recipe_is_refused_by_name(tmp_path, text, message):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    with pytest.raises(ValueError, match=message):
        parse("--config", str(recipe))


def test_a_missing_required_flag_is_named():
    with pytest.raises(ValueError, match="-d/--dataset is required"):
        build_config(FinetuneConfig, {"pretrained": "base", "lora_rank": 8, "plugin": "moe"})


def test_help_shows_every_flag_and_its_default():
    text = make_parser(FinetuneConfig, "test").format_help()
    for name in flatten_config(parse()):
        assert f"--{name}" in text
    assert "(default: 0.0003)" in text


def test_help_says_what_a_flag_needs_and_what_is_refused():
    text = " ".join(make_parser(FinetuneConfig, "test").format_help().split()).replace("- ", "-")  # lines break there
    for flag, shown in (
        ("--lora_rank INT", "trains all weights (default: 0)"),
        ("--sp INT", "above 1 it needs --enable_sequence_parallelism --sp_mode all_to_all"),
        ("--sp_mode", "(ring is refused:"),
        ("--lora_targets", "all-linear, PEFT's word"),
    ):
        start = text.index(f" {flag}")
        assert shown in text[start : start + 500], flag


def test_config_and_cli_import_nothing_heavy():
    code = (
        "import sys, coati_ext.config, coati_ext.cli, coati_ext.utils.preflight\n"
        "assert not {'torch', 'transformers', 'colossalai', 'yaml'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
