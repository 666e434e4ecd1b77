"""What an adapter's config and safetensors header tell before torch is imported. Standard library only."""

import json
import os
from pathlib import Path
from typing import Any

from coati_ext.config import LoraSettings
from coati_ext.utils.model_config import read_json_mapping

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library


def adapter_file(directory: str | Path) -> Path:
    """The weights file of an adapter directory.

    Raises:
        ValueError: not an adapter directory, or one with pickled weights.
    """
    directory = Path(directory)
    if not directory.is_dir():
        found = "a file" if directory.is_file() else "not there"
        raise ValueError(f"adapter {directory} is {found}; expected a directory with {CONFIG_FILE} and {WEIGHTS_FILE}")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (directory / name).is_file():
            hint = " (adapter_model.bin is not read: save it as safetensors)" if name == WEIGHTS_FILE else ""
            raise ValueError(f"{directory} is no adapter directory: {name} is not there{hint}")
    return directory / WEIGHTS_FILE


def check_init_adapter(settings: LoraSettings) -> None:
    """The files of --init_adapter, and the flags that repeat what it has.

    Raises:
        ValueError: a missing or damaged file, r and shapes that disagree, --lora_rank or --lora_alpha of another value.
    """
    flag = f"--init_adapter {settings.init_adapter}"
    try:
        weights = adapter_file(settings.init_adapter)
    except ValueError as error:
        raise ValueError(f"--init_adapter: {error}") from None
    adapter = read_json_mapping("--init_adapter", weights.with_name(CONFIG_FILE))
    if adapter.get("peft_type", "LORA") != "LORA":
        raise ValueError(f"{flag}: peft_type in {CONFIG_FILE} is {adapter['peft_type']!r}; only LORA is supported")
    rank = _rank_of_tensors(weights)
    for key, kinds in (("r", int), ("lora_alpha", int | float)):
        if not isinstance(adapter.get(key), kinds) or isinstance(adapter[key], bool) or adapter[key] <= 0:
            raise ValueError(f"{flag}: {key} in {CONFIG_FILE} is {adapter.get(key)!r}; expected a positive number")
    patterns = adapter.get("rank_pattern")
    if rank not in (adapter["r"], *(patterns.values() if isinstance(patterns, dict) else ())):
        raise ValueError(
            f"{flag}: r in {CONFIG_FILE} is {adapter['r']}, but the tensors in {WEIGHTS_FILE} have rank {rank}"
        )
    defaults = LoraSettings()
    for name, value in (("lora_rank", rank), ("lora_alpha", adapter["lora_alpha"])):
        if getattr(settings, name) not in (getattr(defaults, name), value):
            raise ValueError(f"--{name} is that of {flag}, {value}; leave the flag out")


def _rank_of_tensors(file: Path) -> int:
    """The one rank r of all lora_A (r, in) and lora_B (out, r)."""
    ranks: dict[int, str] = {}
    for name, entry in read_safetensors_header("--init_adapter", file).items():
        shape = entry["shape"]
        if "lora_A" not in name and "lora_B" not in name:
            raise ValueError(f"--init_adapter: {file}: {name} is no LoRA weight (lora_A or lora_B)")
        if ".experts.lora_" in name or ".experts.base_layer.lora_" in name:
            raise ValueError(
                f"--init_adapter: {file}: {name} has all experts in one tensor; expected one pair for each expert, "
                "which applications/convert_adapter.py --to per-expert makes"
            )
        if len(shape) != 2 or 0 in shape:
            raise ValueError(f"--init_adapter: {file}: {name} has shape {shape}; expected a matrix")
        ranks.setdefault(shape[0] if "lora_A" in name else shape[1], name)
    if not ranks:
        raise ValueError(f"--init_adapter: {file} holds no tensor")
    if len(ranks) > 1:
        shown = ", ".join(f"{rank} in {name}" for rank, name in sorted(ranks.items())[:2])
        raise ValueError(f"--init_adapter: {file}: one rank for all tensors is supported, found {shown}")
    return next(iter(ranks))


def read_safetensors_header(flag: str, file: Path) -> dict[str, dict[str, Any]]:
    """Tensor name -> {"dtype", "shape", "data_offsets"}, without `__metadata__`.

    Raises:
        ValueError: the file is damaged or cut short; names the flag and the file.
    """
    damaged = f"{flag}: {file} is no whole safetensors file"
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"{damaged}: of {size} bytes, the first 8 claim a header of {length}; copy it again")
        try:
            header = json.loads(opened.read(length))
            header.pop("__metadata__", None)
            end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
            whole = all(isinstance(n, int) for entry in header.values() for n in entry["shape"])
        except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"{damaged}: its header cannot be read ({error}); copy it again") from None
    if not whole or 8 + length + end != size:
        raise ValueError(f"{damaged}: its header needs {8 + length + end} bytes, it has {size}; copy it again")
    return header
