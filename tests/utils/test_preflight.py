import json
import struct

import pytest

from coati_ext.cli import build_config
from coati_ext.config import FinetuneConfig, ParallelConfig
from coati_ext.utils.model_config import num_experts
from coati_ext.utils.preflight import check_finetune, check_layout


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        ({"num_local_experts": 8}, 8),
        ({"n_routed_experts": 256, "n_shared_experts": 1}, 256),
        ({"text_config": {"num_experts": 64}}, 64),
        ({"moe_num_experts": 16}, 16),
        ({"hidden_size": 32}, 0),
        ({"num_zero_experts": 4}, None),  # a MoE, by a name that is not known: not called dense
    ],
)
def test_experts_are_counted_from_the_config(config, experts):
    assert num_experts(config) == experts


MIXTRAL = {"model_type": "mixtral", "num_local_experts": 6, "num_hidden_layers": 5}


@pytest.mark.parametrize(
    ("sizes", "model", "message"),
    [
        ({"ep": 2}, {"model_type": "llama"}, r"--ep 2, but the model \(llama\) is dense"),
        ({"ep": 4}, MIXTRAL, "--ep 4 does not divide the model's 6 experts"),
        ({"ep": 3}, MIXTRAL, "--ep 3 does not divide the 4 processes"),
        (
            {"ep": 2, "pp": 4},
            MIXTRAL,
            "--ep 2 x --pp 4 does not divide the 4 processes of this run; start a multiple of 8",
        ),
        ({"pp": 6}, MIXTRAL, r"--pp 6 leaves stages without a layer: the model \(mixtral\) has 5"),
        ({"pp": 2, "num_layers_per_stage": [2, 2]}, MIXTRAL, "sums to 4, but the model has 5 layers"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(monkeypatch, sizes, model, message):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=message):
        check_layout(ParallelConfig(plugin="moe", **sizes), model)


@pytest.mark.parametrize(
    ("sizes", "model"),
    [({"ep": 2, "pp": 2, "num_layers_per_stage": [2, 3]}, MIXTRAL), ({"ep": 2}, {"num_zero_experts": 6})],
)
def test_a_layout_that_fits_is_not(monkeypatch, sizes, model):
    monkeypatch.setenv("WORLD_SIZE", "4")
    check_layout(ParallelConfig(plugin="moe", **sizes), model)


# --- files

CONFIG = {**MIXTRAL, "num_experts_per_tok": 2, "vocab_size": 5, "hidden_size": 8}
TOKENIZER = {"model": {"vocab": {"a": 0, "b": 4}}, "added_tokens": [{"id": 5}]}
SHAPES = {"x.q_proj.lora_A.weight": [4, 8], "x.q_proj.lora_B.weight": [16, 4]}


def write_safetensors(file, shapes, missing=0):
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 4 * shape[0] * shape[-1]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset - missing))


@pytest.fixture
def files(tmp_path):
    """A model's small files, an adapter's and a data set, all of them right."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    adapter.mkdir()
    (base / "config.json").write_text(json.dumps(CONFIG))
    (base / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    write_safetensors(adapter / "adapter_model.safetensors", SHAPES)
    (tmp_path / "data.jsonl").write_text("[]\n")
    return tmp_path


def check(files, **flags):
    values = {"pretrained": str(files / "base"), "dataset": str(files / "data.jsonl"), "save_dir": str(files / "run")}
    check_finetune(build_config(FinetuneConfig, {**values, "lora_rank": 4, **flags}))


def test_files_that_are_right_pass(files):
    check(files)
    check(files, lora_rank=0, init_adapter=str(files / "adapter"))
    check(files, init_adapter=str(files / "adapter"), tensorboard_dir=str(files / "new" / "tb"), config_file="c.json")


def test_configs_that_are_right_pass(files):
    for config in ({**CONFIG, "vocab_size": None}, {**CONFIG, "text_config": {}}, {"model_type": "llama"}):
        (files / "base" / "config.json").write_text(json.dumps(config))
        check(files)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "config.json is not JSON"),
        ("[1]", "config.json must hold a mapping, found a list"),
        (json.dumps({**CONFIG, "num_hidden_layers": "2"}), 'num_hidden_layers must be a whole number .*, found "2"'),
        (json.dumps({**CONFIG, "num_local_experts": [6]}), r"num_local_experts must be a whole .*, found \[6\]"),
        (json.dumps({**CONFIG, "hidden_size": True}), "hidden_size must be a whole number of at least 1, found true"),
        (json.dumps({**CONFIG, "vocab_size": 0}), "vocab_size must be a whole number of at least 1, found 0"),
        (json.dumps({**CONFIG, "num_experts_per_tok": 7}), "num_experts_per_tok is 7, but a layer has 6 experts"),
        (json.dumps({**CONFIG, "model_type": 3}), "model_type must be a text, found a number"),
        (json.dumps({**CONFIG, "quantization_config": []}), "quantization_config must be a mapping, found a list"),
        (json.dumps({**CONFIG, "text_config": None}), "text_config must be a mapping, found null"),
        (json.dumps({"text_config": {"vocab_size": "9"}}), 'text_config.vocab_size must be .*, found "9"'),
    ],
)
def test_a_wrong_config_is_named_with_file_and_key(files, content, message):
    (files / "base" / "config.json").write_text(content)
    with pytest.raises(ValueError, match=rf"^--pretrained: .*{message}"):
        check(files)


def test_weights_that_cannot_be_kept_in_fp8_are_refused_by_the_flag(files):
    with pytest.raises(ValueError, match=r"^--frozen_dtype fp8: the weights of --pretrained .*base are not FP8"):
        check(files, frozen_dtype="fp8")
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = {"model_type": "llama", "quantization_config": fp8}
    (files / "base" / "config.json").write_text(json.dumps(config))
    check(files, frozen_dtype="fp8")
    with pytest.raises(ValueError, match=r"^--frozen_dtype fp8 with --tp 2: FP8 matrices cannot be shared out"):
        check(files, frozen_dtype="fp8", plugin="3d", tp=2)


def test_a_config_that_is_a_directory_and_a_model_that_is_a_file_are_named(files):
    with pytest.raises(ValueError, match=r"--pretrained .*config.json: is a file"):
        check(files, pretrained=str(files / "base" / "config.json"))
    (files / "base" / "config.json").unlink()
    (files / "base" / "config.json").mkdir()
    with pytest.raises(ValueError, match=r"--pretrained: .*config.json cannot be read: Is a directory"):
        check(files)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json is not JSON"),
        ("tokenizer.json", "{}", "tokenizer.json has no model.vocab"),
        ("tokenizer.json", None, "no tokenizer.json in it, nor tokenizer.model"),
        ("tokenizer.json", '{"model": {"vocab": {"a": 5}}}', "tokens up to 5, but vocab_size in config.json is 5"),
        ("tokenizer.json", '{"model": {"vocab": [1, 2, 3, 4, 5, 6]}}', "tokens up to 5, but vocab_size"),
        ("tokenizer_config.json", "[", "tokenizer_config.json is not JSON"),
    ],
)
def test_a_wrong_tokenizer_file_is_named(files, name, content, message):
    file = files / "base" / name
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(ValueError, match=rf"^--pretrained.*{message}"):
        check(files)


@pytest.mark.parametrize(
    ("shapes", "config", "message"),
    [
        (SHAPES, {"r": 8}, "r in adapter_config.json is 8, but the tensors .* have rank 4"),
        (SHAPES, {"r": 8, "rank_pattern": {"q": 16}}, "r in adapter_config.json is 8"),
        (SHAPES, {"lora_alpha": "8"}, "lora_alpha in adapter_config.json is '8'"),
        (SHAPES, {"peft_type": "IA3"}, "'IA3'; only LORA"),
        ({}, {}, "holds no tensor"),
        ({**SHAPES, "x.lora_A.weight": [4]}, {}, r"x.lora_A.weight has shape \[4\]; expected a matrix"),
        ({**SHAPES, "x.lora_A.weight": [2, 8]}, {}, "one rank .*, found 2 in x.lora_A.weight, 4 in x.q_proj"),
        ({"x.weight": [4, 4]}, {}, "x.weight is no LoRA weight"),
        ({"m.experts.lora_A.weight": [24, 8]}, {}, "convert_adapter.py --to per-expert makes"),
    ],
)
def test_an_adapter_that_cannot_be_gone_on_from_is_named(files, shapes, config, message):
    written = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **config}
    (files / "adapter" / "adapter_config.json").write_text(json.dumps(written))
    write_safetensors(files / "adapter" / "adapter_model.safetensors", shapes)
    with pytest.raises(ValueError, match=f"--init_adapter.*{message}"):
        check(files, init_adapter=str(files / "adapter"))


def test_flags_that_contradict_the_adapter_are_refused(files):
    adapter = str(files / "adapter")
    with pytest.raises(ValueError, match=r"--lora_rank is that of --init_adapter .*, 4; leave"):
        check(files, init_adapter=adapter, lora_rank=8)
    with pytest.raises(ValueError, match=r"--lora_alpha is that of --init_adapter .*, 8; leave"):
        check(files, init_adapter=adapter, lora_alpha=32)


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "of 0 bytes"), (b"9" * 40, "claim a header"), (b"\x02" + bytes(7) + b"[]", "header")]
)
def test_a_damaged_adapter_is_named(files, content, message):
    (files / "adapter" / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=f"--init_adapter: .*adapter_model.safetensors is no whole .*{message}"):
        check(files, init_adapter=str(files / "adapter"))


def test_an_adapter_cut_short_or_missing_is_named(files):
    weights = files / "adapter" / "adapter_model.safetensors"
    write_safetensors(weights, SHAPES, missing=1)
    with pytest.raises(ValueError, match=r"its header needs \d+ bytes, it has"):
        check(files, init_adapter=str(files / "adapter"))
    weights.unlink()
    with pytest.raises(
        ValueError, match=r"--init_adapter: .* adapter_model.safetensors is not there.*adapter_model.bin is not read"
    ):
        check(files, init_adapter=str(files / "adapter"))
    with pytest.raises(ValueError, match="--init_adapter: adapter nowhere is not there; expected a directory"):
        check(files, init_adapter="nowhere")


@pytest.mark.parametrize("text", ['{"messages": []}\n{"messages": []}\n', '{"messages": []}', "[1]", "lr: 1"])
def test_a_config_file_that_is_another_file_is_refused(files, text):
    (files / "mine").write_text(text)
    with pytest.raises(ValueError, match=r"--config_file .*mine is another file, which would be lost"):
        check(files, config_file=str(files / "mine"))
    (files / "mine").write_text('{"pretrained": "x"}')
    check(files, config_file=str(files / "mine"))
    with pytest.raises(ValueError, match=r"--config_file .*metrics.jsonl is another file"):
        check(files, config_file="metrics.jsonl")


def test_outputs_that_cannot_be_written_are_named(files, monkeypatch):
    (files / "file").write_text("")
    below, other = str(files / "file" / "x"), files / "other"
    other.mkdir()
    (other / "metrics.jsonl").write_text("")
    for flags, message in (
        ({"tensorboard_dir": below}, "--tensorboard_dir .*file is a file"),
        ({"config_file": below}, "--config_file .*file is a file"),
        ({"config_file": str(other)}, "--config_file .* is a directory"),
        ({"tensorboard_dir": str(other / "tb")}, "--tensorboard_dir .* has the logs of the run in"),
        ({"resume": "nowhere"}, "--resume nowhere: no such directory"),
        ({"use_flash_attn": True}, "-f/--use_flash_attn: the package flash-attn is not installed"),
    ):
        with pytest.raises(ValueError, match=message):
            check(files, **flags)
    monkeypatch.setattr("os.access", lambda path, mode: "other" not in str(path))
    with pytest.raises(ValueError, match=r"--tensorboard_dir .*: no permission to write"):
        check(files, tensorboard_dir=str(other / "new" / "tb"))
