"""What a run asks of a model's `config.json` and tokenizer files before torch is imported. Standard library only."""

import json
from pathlib import Path
from typing import Any

_NUM_EXPERTS_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = "num_experts_per_tok"
_AT_LEAST = {  # keys that are whole numbers in every family
    **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"), 1),
    **dict.fromkeys((*_NUM_EXPERTS_KEYS, _TOP_K), 0),  # dense siblings of a MoE may say 0
}
_TOKENIZER = "tokenizer.json"
_OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken", "spiece.model")
_JSON_KINDS = {dict: "a mapping", list: "a list", str: "a text", bool: "a boolean", int: "a number", float: "a number"}


def read_model_config(pretrained: str) -> dict[str, Any]:
    """The `config.json` of a Hugging Face directory, with the types that a run relies on.

    Raises:
        ValueError: it is missing, no JSON, or a value is not what it must be; names the file and the key.
    """
    directory = Path(pretrained)
    if not directory.is_dir():
        found = "is a file; give its directory" if directory.exists() else "no such directory"
        hint = "" if directory.exists() else " (a model on a hub must be downloaded first)"
        raise ValueError(f"--pretrained {pretrained}: {found}{hint}")
    file = directory / "config.json"
    if not file.exists():
        raise ValueError(f"--pretrained {pretrained}: no config.json in it; is it a Hugging Face model?")
    model_config = read_json_mapping("--pretrained", file)
    text_config = model_config.get("text_config", {})
    if not isinstance(text_config, dict):
        raise ValueError(f"--pretrained: {file}: text_config must be a mapping, found {_kind(text_config)}")
    for part, prefix in ((model_config, ""), (text_config, "text_config.")):
        _check_types(part, f"--pretrained: {file}: {prefix}")
    return model_config


def _check_types(part: dict[str, Any], where: str) -> None:
    model_type = part.get("model_type")
    if not isinstance(model_type, str | None):
        raise ValueError(f"{where}model_type must be a text, found {_kind(model_type)}")
    for key, bound in _AT_LEAST.items():
        value = part.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < bound):
            raise ValueError(f"{where}{key} must be a whole number of at least {bound}, found {json.dumps(value)}")
    quantization = part.get("quantization_config")
    if not isinstance(quantization, dict | None):
        raise ValueError(f"{where}quantization_config must be a mapping, found {_kind(quantization)}")
    experts, top_k = num_experts(part), part.get(_TOP_K)
    if experts and top_k is not None and not 1 <= top_k <= experts:
        raise ValueError(f"{where}{_TOP_K} is {top_k}, but a layer has {experts} experts")


def text_config_of(model_config: dict[str, Any]) -> dict[str, Any]:
    """The part about the decoder: of a model with vision `text_config`, else the whole."""
    return model_config.get("text_config", model_config)


def num_experts(model_config: dict[str, Any]) -> int | None:
    """Routed experts of a layer; 0 for a dense model, None for a MoE that counts them under a name not known here."""
    text_config = text_config_of(model_config)
    for key in _NUM_EXPERTS_KEYS:
        if text_config.get(key):
            return text_config[key]
    return None if any("expert" in key for key in text_config) else 0


def check_tokenizer_files(pretrained: str, model_config: dict[str, Any]) -> None:
    """What the tokenizer's files tell: that they are there, are JSON, and have no more tokens than the model.

    Raises:
        ValueError: naming --pretrained and the file.
    """
    directory = Path(pretrained)
    if (directory / "tokenizer_config.json").exists():
        read_json_mapping("--pretrained", directory / "tokenizer_config.json")
    file = directory / _TOKENIZER
    if not file.exists():
        if not any(any(directory.glob(pattern)) for pattern in _OTHER_TOKENIZERS):
            raise ValueError(
                f"--pretrained {pretrained}: no {_TOKENIZER} in it, nor {', '.join(_OTHER_TOKENIZERS)}; copy the "
                "tokenizer's files of this model there"
            )
        return
    model = read_json_mapping("--pretrained", file).get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict | list) or not vocabulary:
        raise ValueError(f"--pretrained: {file} has no model.vocab: it is no tokenizer; copy it again")
    vocab_size = text_config_of(model_config).get("vocab_size")
    ids = vocabulary.values() if isinstance(vocabulary, dict) else (len(vocabulary) - 1,)
    last = max((i for i in ids if isinstance(i, int)), default=0)
    if vocab_size is not None and last >= vocab_size:  # added tokens aside: some models never use those they lack
        raise ValueError(
            f"--pretrained: {file} has tokens up to {last}, but vocab_size in config.json is {vocab_size}: one of the "
            "two is of another model"
        )


def read_json_mapping(flag: str, file: Path) -> dict[str, Any]:
    """Raises ValueError that names the flag and the file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{flag}: {file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # of JSON or UTF-8
        raise ValueError(f"{flag}: {file} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{flag}: {file} must hold a mapping, found {_kind(content)}")
    return content


def _kind(value: Any) -> str:
    return "null" if value is None else _JSON_KINDS[type(value)]
