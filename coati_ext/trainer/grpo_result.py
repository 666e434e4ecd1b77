"""What a GRPO run came to: summary.json, the report, the model card and the last lines."""

import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from coati_ext.grpo_config import GRPOConfig
from coati_ext.utils.report import write_report
from coati_ext.utils.run_directory import METRICS_FILE, PAGE_FILE, SUMMARY_FILE
from coati_ext.utils.sizes import format_bytes


def summarise(config: GRPOConfig, summary: dict[str, Any]) -> dict[str, Any]:
    """The summary with what metrics.jsonl says of the whole run, resumed or not; a collective."""
    save_dir = Path(config.output.save_dir)
    if dist.get_rank() == 0:
        lines = [json.loads(line) for line in (save_dir / METRICS_FILE).read_text().splitlines()]
        evaluated = [line for line in lines if "eval/reward" in line]
        trained = [line for line in lines if "reward" in line]
        best = "eval/accuracy" if any("eval/accuracy" in line for line in evaluated) else "eval/reward"
        summary = {
            **summary,
            "eval_metric": best.partition("/")[2] if evaluated else None,
            "eval_before": next((line.get(best) for line in evaluated if line["step"] == 0), None),
            "eval_after": evaluated[-1].get(best) if evaluated else None,
            "reward_first": trained[0]["reward"] if trained else None,  # none where no completion could be scored
            "reward_last": trained[-1]["reward"] if trained else None,
            "memory_gb": max(line["memory_gb"] for line in lines if "memory_gb" in line),
        }
    everywhere = [summary]
    dist.broadcast_object_list(everywhere, src=0)
    return everywhere[0]


def write_summary(config: GRPOConfig, summary: dict[str, Any]) -> None:
    """summary.json, and the report beside it (rank 0): after the adapter, which a full disk must not cost."""
    if dist.get_rank() != 0:
        return
    save_dir = Path(config.output.save_dir)
    (save_dir / SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n")
    shown = {name: value for name, value in summary.items() if name not in ("stopped", "skipped")}
    write_report(save_dir, title=f"GRPO: {config.pretrained}", summary=shown)


def grpo_card(config: GRPOConfig, summary: dict[str, Any]) -> dict[str, str]:
    """What a model card says of the training, beside what `save` knows."""
    files = ", ".join(os.path.abspath(file) for file in config.data.prompt_dataset)
    rewards = ", ".join(config.reward.reward_functions) or config.reward.rm_pretrain
    card = {
        "Method": f"{config.policy.loss}, rewards {rewards}",
        "Data": f"prompts of {files}, {summary['episodes']} episodes, {summary['steps']} optimizer steps",
    }
    if summary["reward_first"] is not None:
        card["Reward"] = f"{summary['reward_first']:.3f} in the first episode, {summary['reward_last']:.3f} in the last"
    if summary["eval_before"] is not None and summary["eval_after"] is not None:
        card["Held out"] = f"{summary['eval_metric']} {summary['eval_before']:.3f} -> {summary['eval_after']:.3f}"
    return card


def grpo_result(config: GRPOConfig, summary: dict[str, Any]) -> str:
    """The lines that say what the training came to."""
    text = f"{summary['episodes']} episodes in {summary['seconds']:.0f} s, "
    if summary["reward_first"] is not None:
        text += f"reward {summary['reward_first']:.3f} -> {summary['reward_last']:.3f}, "
    text += f"peak memory {format_bytes(1e9 * summary['memory_gb'])} on rank 0"
    if summary["eval_before"] is not None and summary["eval_after"] is not None:
        text += f"\nheld out: {summary['eval_metric']} {summary['eval_before']:.3f} -> {summary['eval_after']:.3f}"
    return f"{text}\nreport: {Path(config.output.save_dir) / PAGE_FILE}"
