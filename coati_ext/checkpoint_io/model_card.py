"""The `README.md` of an exported adapter."""

import json

import peft
import torch
import transformers
from torch import nn

from coati_ext import __version__


def package_versions() -> dict[str, str]:
    """What the adapter was made with."""
    return {
        "coati_ext": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
    }


def model_card(model: nn.Module, base: str | None, tensors: dict[str, torch.Tensor], details: dict[str, str]) -> str:
    """Markdown with the hub's YAML head, from the injection's report and the tensors that are written.

    Args:
        details: further lines of the list, e.g. {"Data": "train.jsonl, 12,000 conversations"}.
    """
    report = model.lora_report
    head = ["---", *([f"base_model: {json.dumps(base)}"] if base else []), "library_name: peft"]
    head += ["pipeline_tag: text-generation", "tags:", "- lora", "- coati_ext"]
    head += ["- mixture-of-experts"] if report.num_experts else []
    table = ["| layers | modules | projections | parameters |", "| --- | --- | --- | --- |"]
    for row in report.rows:
        names = ", ".join(row.projections) or "not adapted"
        if row.kind == "routed experts" and row.num_modules:
            names += f", {report.num_experts} experts each"
        table.append(f"| {row.kind} | {row.num_modules} | {names} | {row.num_trainable:,} |")
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    facts = {
        "Base model": base or "not recorded",
        "Rank": str(report.rank),
        "Alpha": f"{report.scaling * report.rank:g} (scaling {report.scaling:g})",
        "Tensors": f"{len(tensors):,}, {', '.join(dtypes)}",
        **({"Router": "frozen"} if report.num_experts else {}),
        **details,
        "Made with": ", ".join(f"{name} {version}" for name, version in package_versions().items()),
    }
    return "\n".join(
        [
            *head,
            "---",
            "",
            f"# LoRA adapter of {base or type(model).__name__}",
            "",
            *(f"- {name}: {' '.join(str(value).split())}" for name, value in facts.items()),
            "",
            *table,
            "",
            "Load it with transformers 5 and PEFT from this directory; with vLLM, SGLang or transformers 4 from",
            "`transformers4/`, which has the same weights and the config that these read. Check that every tensor",
            "arrives: `python applications/verify_adapter.py --pretrained BASE --adapter DIR`.",
            "",
        ]
    )
