"""What can be known to be wrong before torch is imported and a GPU is touched. Standard library only."""

import importlib.util
import json
import math
import os
from pathlib import Path
from typing import Any

from coati_ext.config import FinetuneConfig, OutputConfig, ParallelConfig
from coati_ext.grpo_config import GRPOConfig
from coati_ext.utils.adapter_files import check_init_adapter
from coati_ext.utils.model_config import check_tokenizer_files, num_experts, read_model_config, text_config_of
from coati_ext.utils.run_directory import ADAPTER_DIR, LOGS, METRICS_FILE, MODEL_DIR, STATES_DIR, check_earlier_run

# MoE families that train here and whose adapter stock PEFT loads. tests/test_families.py shows it for each of them, and
# that these are all that the installed transformers and PEFT allow.
MOE_FAMILIES = frozenset({
    "afmoe", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe",
    "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hunyuan_v1_moe", "mellum", "minimax", "minimax_m2",
    "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next", "solar_open",
})  # fmt: skip

_REFUSED = {
    "gpt_oss": "its experts have biases and transposed, interleaved weights, which the experts layer does not compute",
    "kimi_k2": "transformers has no such model, but Kimi-K2 is built as DeepSeek-V3: set model_type to 'deepseek_v3' "
    "in config.json",
    "longcat_flash": "some of its experts have no weights, which the experts layer does not compute",
    "nemotron_h": "its experts have no gate, and the experts layer computes gated ones only",
}
_NO_CONVERSION = "PEFT has no conversion for adapters of this family and would drop the experts' tensors"


def check_finetune(config: FinetuneConfig) -> None:
    """Paths, files of the model and the adapter, and the layout against the model and the number of processes.

    Raises:
        ValueError, OSError: naming the flag, what was found and what to do.
    """
    check_model(config)
    check_files("--dataset", [config.data.dataset])
    check_results(config)


def check_grpo(config: GRPOConfig) -> None:
    """As `check_finetune`, for GRPO.

    Raises:
        ValueError, OSError: naming the flag, what was found and what to do.
    """
    check_model(config, tokenizer_dir=config.data.tokenizer_dir)
    template = config.data.conversation_template_config
    check_files("--prompt_dataset", config.data.prompt_dataset)
    check_files("--eval_dataset", config.data.eval_dataset)
    check_files("--ptx_dataset", config.data.ptx_dataset)
    check_files("--conversation_template_config", [] if template is None else [template])
    for flag in ("rm_pretrain", "rm_checkpoint_path"):
        directory = getattr(config.reward, flag)
        if directory is not None and not Path(directory, "config.json").is_file():
            raise ValueError(f"--{flag} {directory}: no directory of a model (it has no config.json)")
    if config.output.use_wandb and importlib.util.find_spec("wandb") is None:
        raise ValueError(
            "--use_wandb: the package wandb is not installed: pip install 'wandb>=0.18,<1', or leave it out"
        )
    check_results(config)


def check_model(config: FinetuneConfig | GRPOConfig, *, tokenizer_dir: str | None = None) -> None:
    """The files of the model, the adapter and the tokenizer, and the layout."""
    model_config = read_model_config(config.pretrained)
    check_family(model_config)  # before the quantisation and the layout: nothing that the user converts would help
    _check_quantization(config, model_config)
    check_layout(config.parallel, model_config)
    if tokenizer_dir is None:
        check_tokenizer_files(config.pretrained, model_config)
    elif not Path(tokenizer_dir).is_dir():
        raise ValueError(f"--tokenizer_dir {tokenizer_dir}: no such directory")
    if config.train.use_flash_attn and importlib.util.find_spec("flash_attn") is None:
        raise ValueError("-f/--use_flash_attn: the package flash-attn is not installed; leave it out to use SDPA")
    if config.lora.init_adapter is not None:
        check_init_adapter(config.lora)


def check_files(flag: str, files: list[str]) -> None:
    for file in files:
        if not Path(file).is_file():
            what = "is a directory; expected a file" if Path(file).is_dir() else "no such file"
            raise ValueError(f"{flag} {file}: {what}")


def check_results(config: FinetuneConfig | GRPOConfig) -> None:
    """Where results go, and what a run goes on from."""
    if config.output.resume not in (None, "latest") and not Path(config.output.resume).is_dir():
        raise ValueError(f"--resume {config.output.resume}: no such directory (or give latest)")
    _check_outputs(config)
    check_output_is_free(config)


def check_output_is_free(config: FinetuneConfig | GRPOConfig) -> None:
    """Raises: ValueError, if the run would replace the result of another unasked, or mix with its states."""
    output = config.output
    result = ADAPTER_DIR if config.trains_adapter else MODEL_DIR
    check_earlier_run(Path(output.save_dir), result=result, overwrite=output.overwrite, resume=output.resume)


def _check_outputs(config: FinetuneConfig | GRPOConfig) -> None:
    """What would otherwise fail after the training, with its result."""
    save_dir, base = Path(config.output.save_dir), Path(config.pretrained)
    _check_writable("--save_dir", save_dir)
    for name in (ADAPTER_DIR, MODEL_DIR, STATES_DIR, "nonfinite"):
        if (save_dir / name).exists() and not (save_dir / name).is_dir():
            raise ValueError(f"--save_dir {save_dir}: {save_dir / name} is a file, where the run needs a directory")
    file, logs = config_path(config.output), tensorboard_path(config.output)
    if file.is_dir():
        raise ValueError(f"--config_file {file} is a directory; give a file in it")
    if (file.exists() and not _is_config(file)) or (file.parent.resolve() == save_dir.resolve() and file.name in LOGS):
        raise ValueError(f"--config_file {file} is another file, which would be lost; give a new name")
    _check_writable("--config_file", file.parent)
    _check_writable("--tensorboard_dir", logs)
    if logs.parent.resolve() != save_dir.resolve() and (logs.parent / METRICS_FILE).exists():
        raise ValueError(
            f"--tensorboard_dir {logs} has the logs of the run in {logs.parent}; give one of this run, such as "
            f"{save_dir / 'tensorboard'}"
        )
    if config.trains_adapter:
        return
    if base.resolve() in (save_dir.resolve(), *save_dir.resolve().parents):
        raise ValueError(f"--save_dir {save_dir} is inside --pretrained {base}; give a directory beside it")
    model = save_dir / MODEL_DIR
    if model.is_dir() and any(model.iterdir()) and not (model / "config.json").is_file():
        raise ValueError(f"--save_dir {save_dir}: {model} has files but is no model; move them away")


def _is_config(file: Path) -> bool:
    """Whether the file is a run's config: this project's, or ColossalChat's."""
    try:
        flags = json.loads(file.read_bytes())
    except (ValueError, OSError, RecursionError):
        return False
    return isinstance(flags, dict) and not flags.keys().isdisjoint(("pretrained", "pretrain"))


def config_path(output: OutputConfig) -> Path:
    """Where the resolved config goes."""
    file = Path(output.config_file)
    return Path(output.save_dir) / file if file.name == str(file) else file


def tensorboard_path(output: OutputConfig) -> Path:
    """Where TensorBoard's logs go."""
    return Path(output.save_dir, "tensorboard") if output.tensorboard_dir is None else Path(output.tensorboard_dir)


def _check_quantization(config: FinetuneConfig | GRPOConfig, model_config: dict[str, Any]) -> None:
    """FP8 in blocks is dequantised while it is read, or kept; what else is quantised cannot be trained from."""
    pretrained, wanted, tp = config.pretrained, config.lora.frozen_dtype, config.parallel.tp
    found = model_config.get("quantization_config") or text_config_of(model_config).get("quantization_config")
    method = found.get("quant_method", "unknown") if isinstance(found, dict) else found
    if method not in (None, "fp8"):
        raise ValueError(
            f"--pretrained {pretrained}: the checkpoint is quantised ({method}); training needs BF16, FP16, FP32 or "
            "block-scaled FP8 weights"
        )
    if wanted is not None and method is None:
        raise ValueError(
            f"--frozen_dtype {wanted}: the weights of --pretrained {pretrained} are not FP8 (no quantization_config in "
            "config.json); make an FP8 checkpoint of it with applications/bf16_cast_fp8.py, or leave the flag out"
        )
    if wanted is not None and tp > 1:
        raise ValueError(f"--frozen_dtype {wanted} with --tp {tp}: FP8 matrices cannot be shared out; use --tp 1")


def check_family(model_config: dict[str, Any]) -> None:
    """Refuse a MoE family whose experts cannot be trained or exported. A dense model passes, whatever its type.

    Example:
        >>> check_family({"model_type": "mixtral", "num_local_experts": 8})
        >>> check_family({"model_type": "llama"})
    """
    model_type = model_config.get("model_type")
    if model_type in MOE_FAMILIES or not num_experts(model_config):
        return  # experts under a name not known here are left to `enable_lora`, which sees the modules
    raise ValueError(
        f"--pretrained: LoRA on a MoE with model_type {model_type!r} is not supported: "
        f"{_REFUSED.get(model_type, _NO_CONVERSION)}. Supported: {sorted(MOE_FAMILIES)}."
    )


def check_layout(parallel: ParallelConfig, model_config: dict[str, Any]) -> None:
    """The layout against the model's experts and layers, and against the processes that the launcher started."""
    model_type = model_config.get("model_type", "?")
    ep, pp, experts = parallel.ep, parallel.pp, num_experts(model_config)
    if ep > 1 and experts == 0:
        raise ValueError(f"--ep {ep}, but the model ({model_type}) is dense: it has no experts to spread. Use --ep 1.")
    if experts and experts % ep:
        raise ValueError(f"--ep {ep} does not divide the model's {experts} experts")
    if parallel.tp > 1 and experts != 0:
        raise ValueError(f"--tp {parallel.tp}: tensor parallelism of experts is not built ({model_type}); use --ep")
    layers = text_config_of(model_config).get("num_hidden_layers")
    if layers is not None and pp > layers:
        raise ValueError(f"--pp {pp} leaves stages without a layer: the model ({model_type}) has {layers}")
    by_hand = parallel.num_layers_per_stage
    if layers is not None and by_hand is not None and sum(by_hand) != layers:
        raise ValueError(f"--num_layers_per_stage sums to {sum(by_hand)}, but the model has {layers} layers")
    sizes = {name: getattr(parallel, name) for name in ("ep", "pp", "tp", "sp")}
    unit = math.prod(sizes.values())
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size % unit:
        shown = " x ".join(f"--{name} {size}" for name, size in sizes.items() if size > 1)
        raise ValueError(
            f"{shown} does not divide the {world_size} processes of this run; start a multiple of {unit} "
            f"(colossalai run --nproc_per_node {unit} ...)"
        )


def _check_writable(flag: str, directory: Path) -> None:
    existing = directory
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise ValueError(f"{flag} {directory}: {existing} is a file")
    if not os.access(existing, os.W_OK):
        raise ValueError(f"{flag} {directory}: no permission to write in {existing}")
