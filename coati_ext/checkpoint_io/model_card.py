"""The `README.md` of an exported adapter, and of a model that was fine-tuned or merged."""

import json
import os
import shlex
from pathlib import Path

import peft
import torch
import transformers
from torch import nn

from coati_ext import __version__


def package_versions() -> dict[str, str]:
    """What the adapter or model was made with."""
    return {
        "coati_ext": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
    }


def adapter_card(
    model: nn.Module,
    base: str | None,
    directory: str | Path,
    tensors: dict[str, torch.Tensor],
    details: dict[str, str],
) -> str:
    """Markdown with the hub's YAML head, from the injection's report and the tensors that are written.

    Args:
        directory: where the adapter is to be.
        details: further lines of the list, e.g. {"Data": "train.jsonl, 12,000 conversations"}.
    """
    report = model.lora_report
    tags = ["lora", "coati_ext", *(["mixture-of-experts"] if report.num_experts else [])]
    table = ["| layers | modules | projections | parameters |", "| --- | --- | --- | --- |"]
    for row in report.rows:
        names = ", ".join(row.projections) or "not adapted"
        if row.kind == "routed experts" and row.num_modules:
            names += f", {report.num_experts} experts each"
        table.append(f"| {row.kind} | {row.num_modules} | {names} | {row.num_trainable:,} |")
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
    facts = {
        "Base model": _place(base) if base else "not recorded",
        "Rank": str(report.rank),
        "Alpha": f"{report.scaling * report.rank:g} (scaling {report.scaling:g})",
        "Tensors": f"{len(tensors):,}, {', '.join(dtypes)}",
        **({"Router": "frozen"} if report.num_experts else {}),
        **details,
    }
    title = f"LoRA adapter of {base or type(model).__name__}"
    paths = shlex.join(["--pretrained", _place(base) if base else "BASE", "--adapter", os.path.abspath(directory)])
    text = [
        *table,
        "",
        "Load it with transformers 5 and PEFT from this directory; with vLLM, SGLang or transformers 4 from",
        "`transformers4/`, which has the same weights and the config that these read. Check that every tensor",
        "arrives, in a checkout of coati_ext:",
        "",
        f"    python applications/verify_adapter.py {paths}",
    ]
    return _card(title, base, "peft", tags, facts, text)


def full_model_card(base: str | Path, how: str, details: dict[str, str]) -> str:
    """The card of a whole model that was made from `base`.

    Args:
        how: what the title says of it, such as "fully fine-tuned".
        details: as of `adapter_card`.
    """
    facts = {"Base model": _place(base), **details}
    text = ["A whole model under the names of its base: load it as the base is loaded."]
    return _card(f"{Path(base).name}, {how}", str(base), "transformers", ["coati_ext"], facts, text)


def _card(title: str, base: str | None, library: str, tags: list[str], facts: dict[str, str], text: list[str]) -> str:
    made_with = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    lines = ["---", *([f"base_model: {json.dumps(base)}"] if base else []), f"library_name: {library}"]
    lines += ["pipeline_tag: text-generation", "tags:", *(f"- {tag}" for tag in tags), "---", "", f"# {title}", ""]
    lines += [f"- {name}: {' '.join(str(value).split())}" for name, value in {**facts, "Made with": made_with}.items()]
    return "\n".join([*lines, "", *text, ""])


def _place(base: str | Path) -> str:
    """A directory of this machine as a path that works from anywhere on it; a hub's name as it is."""
    return os.path.abspath(base) if os.path.isdir(base) else str(base)
