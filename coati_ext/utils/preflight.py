"""What can be known to be wrong before torch is imported and a GPU is touched. Standard library only."""

import json
import os
from pathlib import Path
from typing import Any

from coati_ext.config import FinetuneConfig

_NUM_EXPERTS_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def check_finetune(config: FinetuneConfig) -> None:
    """Paths, and the layout against the model and the number of processes.

    Raises:
        ValueError, OSError: naming the flag, what was found and what to do.
    """
    model_config = read_model_config(config.pretrained)
    if "quantization_config" in model_config:
        method = model_config["quantization_config"].get("quant_method", "unknown")
        raise ValueError(
            f"--pretrained {config.pretrained}: the checkpoint is quantised ({method}); training from it is not built "
            "yet. Convert it to BF16 first."
        )
    check_expert_layout(num_experts(model_config), config.parallel.ep, model_config.get("model_type", "?"))
    if not Path(config.data.dataset).is_file():
        raise ValueError(f"--dataset {config.data.dataset}: no such file")
    _check_writable("--save_dir", Path(config.output.save_dir))


def read_model_config(pretrained: str) -> dict[str, Any]:
    """The `config.json` of a Hugging Face directory."""
    directory = Path(pretrained)
    if not directory.is_dir():
        raise ValueError(f"--pretrained {pretrained}: no such directory (a model on a hub must be downloaded first)")
    file = directory / "config.json"
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"--pretrained {pretrained}: no config.json in it; is it a Hugging Face model?") from None
    except ValueError as error:
        raise ValueError(f"--pretrained: {file} is not JSON: {error}") from None


def num_experts(model_config: dict[str, Any]) -> int | None:
    """Routed experts of a layer; 0 for a dense model, None for a MoE that counts them under a name not known here."""
    text_config = model_config.get("text_config", model_config)
    for key in _NUM_EXPERTS_KEYS:
        if text_config.get(key):
            return text_config[key]
    return None if any("expert" in key for key in text_config) else 0


def check_expert_layout(experts: int | None, ep: int, model_type: str) -> None:
    """EP against the experts and against the processes that the launcher started."""
    if ep > 1 and experts == 0:
        raise ValueError(f"--ep {ep}, but the model ({model_type}) is dense: it has no experts to spread. Use --ep 1.")
    if experts and experts % ep:
        raise ValueError(f"--ep {ep} does not divide the model's {experts} experts")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size % ep:
        raise ValueError(
            f"--ep {ep} does not divide the {world_size} processes of this run; start a multiple of {ep} "
            f"(colossalai run --nproc_per_node {ep} ...)"
        )


def _check_writable(flag: str, directory: Path) -> None:
    existing = directory
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise ValueError(f"{flag} {directory}: {existing} is a file")
    if not os.access(existing, os.W_OK):
        raise ValueError(f"{flag} {directory}: no permission to write in {existing}")
