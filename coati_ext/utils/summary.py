"""One readable summary of a run that was prepared, trained, exported and verified. Standard library only."""

import json
from pathlib import Path
from typing import Any

from coati_ext.utils.run_directory import METRICS_FILE

MAX_UPCYCLE_LOGIT_DIFF = 1e-3
_ENOUGH_STEPS = 10  # from here on a loss that did not fall is a failure


def summarise(run_dir: str | Path, *, question: str, before: str, after: str, seconds: float) -> dict[str, Any]:
    """Put together what the steps of a run left in its directory.

    Reads upcycle.json, metrics.jsonl and verify.json.

    Raises:
        ValueError: one of them is missing or not what its command writes.
    """
    run_dir = Path(run_dir)
    upcycled, verified = _read(run_dir / "upcycle.json"), _read(run_dir / "verify.json")
    steps = [json.loads(line) for line in _text(run_dir / METRICS_FILE).splitlines()]
    losses = [step["loss"] for step in steps if "skipped" not in step]
    if not losses:
        raise ValueError(f"{run_dir / 'metrics.jsonl'}: no step was trained")
    summary = {
        "upcycle_max_logit_diff": upcycled["max_logit_diff"],
        "steps": len(steps),
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "adapter_max_logit_diff": verified["max_logit_diff"],
        "tensors_applied": verified["tensors_applied"],
        "tensors_missing": len(verified["tensors_missing"]),
        "question": question,
        "answer_before": before,
        "answer_after": after,
        "seconds": round(seconds, 1),
    }
    return {**summary, "problems": _problems(summary, verified["passed"])}


def format_summary(summary: dict[str, Any]) -> str:
    """The summary as a few lines for the terminal."""
    lines = [
        f"upcycled model     logits within {summary['upcycle_max_logit_diff']:.1e} of the dense model's",
        f"training           {summary['steps']} steps, loss {summary['loss_first']:.3f} -> {summary['loss_last']:.3f}",
        f"adapter            {summary['tensors_applied']} tensors applied by stock PEFT, {summary['tensors_missing']} "
        f"missing, logits within {summary['adapter_max_logit_diff']:.1e} of ours",
        f"before             {summary['answer_before']}",
        f"after              {summary['answer_after']}",
        f"time               {summary['seconds']:.0f} s",
    ]
    return "\n".join([*lines, *(f"PROBLEM            {problem}" for problem in summary["problems"])])


def _problems(summary: dict[str, Any], verified: bool) -> list[str]:
    found = []
    if not summary["upcycle_max_logit_diff"] <= MAX_UPCYCLE_LOGIT_DIFF:
        found.append(f"the upcycled model's logits differ by more than {MAX_UPCYCLE_LOGIT_DIFF:g}")
    if summary["steps"] >= _ENOUGH_STEPS and not summary["loss_last"] < summary["loss_first"]:
        found.append("the loss did not fall")
    if not verified:
        found.append("the adapter did not verify")
    return found


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{file} is missing: the step that writes it did not run") from None


def _read(file: Path) -> dict[str, Any]:
    try:
        return json.loads(_text(file))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
