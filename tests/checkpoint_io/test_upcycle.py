import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
)

from coati_ext.checkpoint_io import hf_directory
from coati_ext.checkpoint_io.upcycle import max_logit_diff, upcycle

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 96
TOKEN_IDS_BS = torch.randint(VOCAB, (3, 17), generator=torch.Generator().manual_seed(1))

# With the weights of save_dense the logits reach about 4, so float32 rounding over 2 layers is of the order of 1e-6,
# and one tensor in the wrong place moves a logit by more than 0.1.
ROUNDING = 2e-5

SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.2,
    rms_norm_eps=1e-4,
    max_position_embeddings=64,
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def llama(**kwargs) -> LlamaConfig:
    return LlamaConfig(**{**SHAPE, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}, **kwargs})


DENSE = {
    "llama untied": llama(),
    "llama tied": llama(tie_word_embeddings=True),
    "llama without GQA": llama(num_key_value_heads=4),
    "llama one KV head": llama(num_key_value_heads=1),
    "llama scaled rope": llama(rope_parameters=LLAMA3_ROPE),
    "llama own head_dim": llama(head_dim=12),
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
    "mistral sliding window": MistralConfig(**SHAPE, sliding_window=5),
    "qwen3": Qwen3Config(**SHAPE, head_dim=12),
    "qwen3 tied": Qwen3Config(**SHAPE, head_dim=12, tie_word_embeddings=True),
    "qwen3 attention bias": Qwen3Config(**SHAPE, head_dim=12, attention_bias=True),
}


def save_dense(config, directory: Path, **save_kwargs) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)  # ones and zeros would hide a swap
    model.save_pretrained(directory, **save_kwargs)
    return directory


@pytest.fixture
def dense_dir(tmp_path: Path) -> Path:
    return save_dense(llama(), tmp_path / "dense")


def edit_config(model_dir: Path, **values) -> None:
    file = model_dir / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize("name", DENSE)
def test_logits_equal_the_dense_model(name, tmp_path):
    dense = save_dense(DENSE[name], tmp_path / "dense")
    upcycle(dense, tmp_path / "moe")
    assert max_logit_diff(dense, tmp_path / "moe", TOKEN_IDS_BS) < ROUNDING


@pytest.mark.parametrize(("num_experts", "top_k"), [(2, 1), (3, 3), (5, 2)])
def test_logits_equal_for_any_number_of_experts(num_experts, top_k, dense_dir, tmp_path):
    upcycle(dense_dir, tmp_path / "moe", num_experts=num_experts, top_k=top_k)
    assert max_logit_diff(dense_dir, tmp_path / "moe", TOKEN_IDS_BS) < ROUNDING


def test_logit_diff_shows_one_changed_expert(dense_dir, tmp_path):
    upcycle(dense_dir, tmp_path / "moe")
    weights = load_file(tmp_path / "moe/model.safetensors")
    weights["model.layers.1.block_sparse_moe.experts.2.w3.weight"].neg_()
    save_file(weights, tmp_path / "moe/model.safetensors", metadata={"format": "pt"})
    assert max_logit_diff(dense_dir, tmp_path / "moe", TOKEN_IDS_BS) > 0.1


@pytest.mark.parametrize("name", ["llama tied", "qwen3 attention bias"])
def test_directory_is_what_transformers_saves(name, tmp_path):
    upcycle(save_dense(DENSE[name], tmp_path / "dense"), tmp_path / "moe")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
    model.save_pretrained(tmp_path / "again")

    ours, theirs = (load_file(tmp_path / d / "model.safetensors") for d in ("moe", "again"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert (tmp_path / "moe/config.json").read_text() == (tmp_path / "again/config.json").read_text()


def test_config_carries_over(tmp_path):
    dense = save_dense(llama(rope_parameters=LLAMA3_ROPE, head_dim=12, dtype="bfloat16"), tmp_path / "dense")
    upcycle(dense, tmp_path / "moe", num_experts=6, top_k=3)

    old, new = (AutoConfig.from_pretrained(path) for path in (dense, tmp_path / "moe"))
    same = ("rope_parameters", "head_dim", "rms_norm_eps", "vocab_size", "intermediate_size", "num_key_value_heads")
    same += ("tie_word_embeddings", "max_position_embeddings", "bos_token_id", "eos_token_id", "hidden_act", "dtype")
    assert {key: getattr(new, key) for key in same} == {key: getattr(old, key) for key in same}
    assert (new.model_type, new.architectures) == ("mixtral", ["MixtralForCausalLM"])
    assert (new.num_local_experts, new.num_experts_per_tok, new.sliding_window) == (6, 3, None)


def test_weights_keep_their_dtype(tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(llama()).bfloat16().save_pretrained(tmp_path / "dense")
    upcycle(tmp_path / "dense", tmp_path / "moe")
    assert {weight.dtype for weight in load_file(tmp_path / "moe/model.safetensors").values()} == {torch.bfloat16}


def test_counts_are_those_of_the_models(tmp_path):
    dense = save_dense(DENSE["llama tied"], tmp_path / "dense")
    result = upcycle(dense, tmp_path / "moe", num_experts=5, top_k=2)

    old, new = (AutoModelForCausalLM.from_pretrained(path) for path in (dense, tmp_path / "moe"))
    assert result.num_params_dense == old.num_parameters()
    assert result.num_params_moe == new.num_parameters()
    one_expert_everywhere = 2 * 3 * 32 * 48
    assert result.num_params_active == new.num_parameters() - 3 * one_expert_everywhere


def test_router_depends_on_layer_and_seed_only(dense_dir, tmp_path):
    def routers(seed: int, **kwargs) -> list[torch.Tensor]:
        upcycle(dense_dir, tmp_path / "moe", seed=seed, overwrite=True, **kwargs)
        weights = load_file(tmp_path / "moe/model.safetensors")
        return [weights[f"model.layers.{layer}.block_sparse_moe.gate.weight"] for layer in range(2)]

    first, again, other = routers(0), routers(0, noise_std=0.1), routers(1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert not torch.equal(*first)
    assert first[0].std().item() == pytest.approx(0.2, rel=0.25)  # initializer_range, from 128 draws


def test_all_experts_are_used(dense_dir, tmp_path):
    upcycle(dense_dir, tmp_path / "moe")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
    router_logits = model(TOKEN_IDS_BS, output_router_logits=True).router_logits
    for logits_TE in router_logits:
        assert set(logits_TE.topk(2).indices.flatten().tolist()) == {0, 1, 2, 3}


def test_noise_is_relative_and_differs_between_experts(dense_dir, tmp_path):
    upcycle(dense_dir, tmp_path / "moe", noise_std=0.1)
    weights = load_file(tmp_path / "moe/model.safetensors")
    dense = load_file(dense_dir / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    noise = [weights[f"model.layers.0.block_sparse_moe.experts.{e}.w3.weight"] - dense for e in range(4)]
    for n in noise:
        assert (n.std() / dense.std()).item() == pytest.approx(0.1, rel=0.1)  # 1536 draws: 2% at one sigma
    assert not torch.equal(noise[0], noise[1])


def test_tokenizer_and_generation_config_are_copied_but_nothing_stale(dense_dir, tmp_path):
    contents = {"tokenizer.json": "{}", "chat_template.jinja": "{{ x }}", "generation_config.json": '{"top_k": 7}'}
    contents |= {"LICENSE": "yes", "additional_chat_templates/tool.jinja": "t"}
    (dense_dir / "additional_chat_templates").mkdir()
    for name, text in (contents | {"README.md": "a dense model"}).items():
        (dense_dir / name).write_text(text)
    upcycle(dense_dir, tmp_path / "moe")
    assert {name: (tmp_path / "moe" / name).read_text() for name in contents} == contents
    assert not (tmp_path / "moe/README.md").exists()


def test_several_shards_in_and_out(tmp_path, monkeypatch):
    dense = save_dense(llama(), tmp_path / "dense", max_shard_size="20KB")
    assert len(list(dense.glob("*.safetensors"))) > 2
    upcycle(dense, tmp_path / "one")
    monkeypatch.setattr(
        hf_directory.ShardWriter.__init__, "__kwdefaults__", {"max_shard_bytes": 9000, "metadata": None}
    )
    upcycle(dense, tmp_path / "many")

    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    assert shards[1].name == f"model-00002-of-{len(shards):05d}.safetensors"
    # One tensor larger than the limit (the 96 x 32 embeddings) gets a shard of its own; 2 kB are for the header.
    assert all(shard.stat().st_size < 96 * 32 * 4 + 2000 for shard in shards)
    assert max_logit_diff(dense, tmp_path / "many", TOKEN_IDS_BS) < ROUNDING
    one = load_file(tmp_path / "one/model.safetensors")
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == one.keys()
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in one.values())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (llama(attention_bias=True), "attention_bias=True, which mixtral cannot hold"),
        (llama(mlp_bias=True), "mlp_bias=True"),
        (Qwen2Config(**SHAPE), "is a qwen2 model: its q, k and v biases.*accepted: llama, mistral, qwen3"),
        (GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2), "is a gpt2 model"),
        (MixtralConfig(**SHAPE), "is a mixtral model, which has experts already"),
        (
            Qwen3Config(**SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=1),
            "use_sliding_window=True",
        ),
    ],
)
def test_refuses_what_the_moe_cannot_hold(config, message, tmp_path):
    dense = save_dense(config, tmp_path / "dense")
    with pytest.raises(ValueError, match=message):
        upcycle(dense, tmp_path / "moe")
    assert not (tmp_path / "moe").exists()


def test_refuses_quantised_weights(dense_dir, tmp_path):
    edit_config(dense_dir, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ValueError, match="is quantised; cast it to bf16"):
        upcycle(dense_dir, tmp_path / "moe")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 2, "top_k": 3}, "top_k=3 and num_experts=2"),
        ({"top_k": 0}, "top_k=0"),
        ({"num_experts": 1, "top_k": 1}, "num_experts=1: a mixture needs at least 2"),
        ({"noise_std": -0.1}, "noise_std=-0.1"),
    ],
)
def test_refuses_options(options, message, dense_dir, tmp_path):
    with pytest.raises(ValueError, match=message):
        upcycle(dense_dir, tmp_path / "moe", **options)


def test_missing_source(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere has no config\.json"):
        upcycle(tmp_path / "nowhere", tmp_path / "moe")


def test_source_without_safetensors(dense_dir, tmp_path):
    (dense_dir / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="holds neither"):
        upcycle(dense_dir, tmp_path / "moe")


def test_source_with_a_shard_missing(tmp_path):
    dense = save_dense(llama(), tmp_path / "dense", max_shard_size="20KB")
    shard = min(dense.glob("*.safetensors"))
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=shard.name):
        upcycle(dense, tmp_path / "moe")


def test_source_cut_short(dense_dir, tmp_path):
    file = dense_dir / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        upcycle(dense_dir, tmp_path / "moe")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.layers.1.mlp.up_proj.weight"), r"1 tensors missing.*layers\.1\.mlp\.up_proj"),
        (lambda w: w.update({"model.layers.0.extra.weight": torch.ones(1)}), r"not known.*layers\.0\.extra"),
        (lambda w: w.update({"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)}), r"model\.norm.*F8_E4M3"),
    ],
)
def test_source_with_wrong_tensors(change, message, dense_dir, tmp_path):
    weights = load_file(dense_dir / "model.safetensors")
    change(weights)
    save_file(weights, dense_dir / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        upcycle(dense_dir, tmp_path / "moe")


def test_occupied_output_is_kept_unless_overwrite(dense_dir, tmp_path):
    output = tmp_path / "moe"
    output.mkdir()  # an empty directory is fine
    upcycle(dense_dir, output, num_experts=2)
    with pytest.raises(FileExistsError, match="exists and is not empty; choose another --output or pass --overwrite"):
        upcycle(dense_dir, output)
    assert AutoConfig.from_pretrained(output).num_local_experts == 2
    upcycle(dense_dir, output, overwrite=True)
    assert AutoConfig.from_pretrained(output).num_local_experts == 4


def test_overwrite_spares_what_is_not_a_model(dense_dir, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/thesis.tex").write_text("ten years")
    with pytest.raises(FileExistsError, match="not a model directory"):
        upcycle(dense_dir, tmp_path / "thesis", overwrite=True)
    with pytest.raises(ValueError, match="dense model's own directory"):
        upcycle(dense_dir, dense_dir, overwrite=True)
    assert (tmp_path / "thesis/thesis.tex").read_text() == "ten years"


def test_full_disk_is_seen_before_writing(dense_dir, tmp_path, monkeypatch):
    size = (dense_dir / "model.safetensors").stat().st_size
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2 * size))
    with pytest.raises(OSError, match=r"KB free, moe needs [\d.]+ KB; "):
        upcycle(dense_dir, tmp_path / "moe")
    upcycle(dense_dir, tmp_path / "moe", num_experts=2)


def test_failed_run_leaves_nothing_and_an_old_leftover_goes(dense_dir, tmp_path, monkeypatch):
    (tmp_path / ".moe.partial").mkdir()
    (tmp_path / ".moe.partial/model.safetensors").write_text("of a killed run")

    def fail(self: hf_directory.ShardWriter) -> None:
        raise OSError("disk gone")

    with monkeypatch.context() as patch:
        patch.setattr(hf_directory.ShardWriter, "close", fail)
        with pytest.raises(OSError, match="disk gone"):
            upcycle(dense_dir, tmp_path / "moe")
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_logit_check_refuses_a_model_that_loads_in_part(dense_dir, tmp_path):
    upcycle(dense_dir, tmp_path / "moe")
    weights = load_file(tmp_path / "moe/model.safetensors")
    del weights["model.layers.1.block_sparse_moe.gate.weight"]
    save_file(weights, tmp_path / "moe/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"did not load completely: .*layers\.1\.mlp\.gate"):
        max_logit_diff(dense_dir, tmp_path / "moe", TOKEN_IDS_BS)


def test_logit_check_refuses_nan(dense_dir, tmp_path):
    upcycle(dense_dir, tmp_path / "moe")
    weights = load_file(tmp_path / "moe/model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, tmp_path / "moe/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="not finite"):
        max_logit_diff(dense_dir, tmp_path / "moe", TOKEN_IDS_BS)


@pytest.mark.slow
def test_application_prints_the_check_and_fails_without_a_traceback(dense_dir, tmp_path):
    command = [sys.executable, "applications/upcycle.py", "--pretrained", dense_dir, "--output", tmp_path / "moe"]
    done, again = (subprocess.run(command, cwd=ROOT, capture_output=True, text=True) for _ in range(2))
    assert done.returncode == 0, done.stderr
    assert "largest logit difference over 64 tokens" in done.stdout
    assert again.returncode == 1
    assert "Traceback" not in again.stderr
    assert again.stderr.startswith("error: ")
