"""GRPO steps of ours and of TRL's GRPOTrainer: the same work in one run, each engine in a process of its own.

Same are the model and its precision (bf16 on a GPU, fp32 on a CPU), the prompts, the completions of each and their
length (no end before the limit, so that tokens are equal), the adapter's rank and matrices, the rows of a micro-batch,
one optimizer step for each batch of completions, no KL term and no recomputation of activations. That tokens and
trained parameters are equal is checked. What a completion is paid is a hash of its text, so that advantages differ.
TRL's settings are in `coati_ext.benchmark.grpo_trl`.
"""

import json
import os
import platform
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from coati_ext.benchmark.process import in_own_process, own_peaks
from coati_ext.dataset.jsonl import iter_prompts
from coati_ext.utils.model_config import num_experts, read_model_config, text_config_of
from coati_ext.versions import installed, satisfies

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ENGINES = ("ours", "trl", "trl_continuous")
TRL_VERSIONS = ">=1.16,<1.17"  # its trainer's inner methods are timed
PHASES = ("generate", "score", "log_probs", "update")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What every engine does.

    Raises:
        ValueError: a number out of range; names the flag.
    """

    pretrained: str
    prompts: tuple[list[dict[str, Any]], ...]
    """Turns of each."""
    num_generations: int = 8
    max_seq_len: int = 64
    """Tokens of every completion."""
    batch_size: int = 8
    """Completions of a micro-batch of training."""
    steps: int = 3
    warmup: int = 1
    """Steps before the measured ones."""
    lora_rank: int = 16
    seed: int = 42

    def __post_init__(self) -> None:
        bounds = dict(num_generations=2, max_seq_len=1, batch_size=1, steps=1, warmup=1, lora_rank=1)
        for name, bound in bounds.items():
            if getattr(self, name) < bound:
                raise ValueError(f"--{name} must be at least {bound}, got {getattr(self, name)}")
        if self.num_rows % self.batch_size:
            raise ValueError(
                f"--batch_size {self.batch_size} does not divide the {self.num_rows} completions of a step "
                "(--num_prompts x --num_generations), which TRL needs"
            )

    @property
    def num_rows(self) -> int:
        """Completions of a step."""
        return len(self.prompts) * self.num_generations

    @property
    def num_steps(self) -> int:
        return self.warmup + self.steps

    @property
    def lora_alpha(self) -> int:
        return 2 * self.lora_rank

    @property
    def max_positions(self) -> int:
        """Of prompt and completion together."""
        return text_config_of(read_model_config(self.pretrained)).get("max_position_embeddings") or 1 << 15


def precision() -> str:
    return "bf16" if torch.cuda.is_available() else "fp32"


def text_reward(completion: str, gold: Any = None) -> float:
    """In [0, 1], and hardly ever the same for two texts.

    Example:
        >>> text_reward("a") == text_reward("a"), text_reward("a") == text_reward("b")
        (True, False)
    """
    return zlib.crc32(completion.encode()) % 1009 / 1008


@dataclass(kw_only=True)
class StepLog:
    """What the steps of one engine took; an engine calls `end_step` at the end of each."""

    rows: list[dict[str, float]] = field(default_factory=list)
    """Of each step: seconds of `PHASES` and of the whole, tokens generated and trained on (prompts included)."""
    _last: float | None = None

    def end_step(self, *, num_generated: int, num_trained: int, **seconds: float) -> None:
        """
        Args:
            seconds: of the phases that the engine has.
        """
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._last is not None:  # the first step, of the warm-up, has no beginning
            phases = {name: seconds.get(name, 0.0) for name in PHASES}
            tokens = {"num_generated": num_generated, "num_trained": num_trained}
            self.rows.append({"step": now - self._last, **phases, **tokens})
        self._last = now


def measured(workload: Workload, log: StepLog, *, num_trained_parameters: int) -> dict[str, Any]:
    """The result of an engine: medians over the steps after the warm-up, rates from them, peak memory of the process.

    Raises:
        ValueError: a step had other tokens than it was asked for.
    """
    rows = log.rows[workload.warmup - 1 :]
    if len(rows) != workload.steps:
        raise ValueError(f"{len(rows)} steps were measured, expected {workload.steps}")
    wanted = workload.num_rows * workload.max_seq_len
    for row in rows:
        if row["num_generated"] != wanted:
            raise ValueError(f"a step generated {row['num_generated']} tokens, expected {wanted}")
    seconds = {name: statistics.median(row[name] for row in rows) for name in ("step", *PHASES)}
    seconds["other"] = statistics.median(row["step"] - sum(row[name] for name in PHASES) for row in rows)
    training = statistics.median(row["log_probs"] + row["update"] for row in rows)
    peaks = own_peaks()
    return {
        "samples_per_s": workload.num_rows / seconds["step"],
        "generation_tokens_per_s": wanted / seconds["generate"],
        "training_tokens_per_s": rows[0]["num_trained"] / training,
        "seconds": seconds,
        "peak_bytes": peaks.device_allocated or peaks.host,
        "peaks": asdict(peaks),
        "num_trained_tokens": rows[0]["num_trained"],
        "num_trained_parameters": num_trained_parameters,
        "steps": rows,
    }


def ours(workload: Workload) -> dict[str, Any]:
    """`applications/train_grpo.py` with the flags that the work is made of, and no end before the limit."""
    with tempfile.TemporaryDirectory() as folder:
        return _ours(workload, _our_config(workload, Path(folder)))


def _our_config(workload: Workload, folder: Path) -> Any:
    from coati_ext import grpo_config
    from coati_ext.config import ParallelConfig

    prompts = folder / "prompts.jsonl"
    lines = [json.dumps({"messages": messages, "gt_answer": 0}) + "\n" for messages in workload.prompts]
    prompts.write_text("".join(lines), encoding="utf-8")
    return grpo_config.GRPOConfig(
        pretrained=workload.pretrained,
        data=grpo_config.PromptConfig(
            prompt_dataset=[str(prompts)], max_length=workload.max_positions, max_seq_len=workload.max_seq_len
        ),
        rollout=grpo_config.RolloutConfig(
            experience_batch_size=len(workload.prompts),
            num_generations=workload.num_generations,
            inference_batch_size=workload.num_rows,
        ),
        reward=grpo_config.RewardConfig(reward_functions=[f"{__name__}:{text_reward.__name__}"]),
        policy=grpo_config.PolicyConfig(),
        train=grpo_config.UpdateConfig(
            num_episodes=workload.num_steps, train_batch_size=workload.batch_size, seed=workload.seed
        ),
        lora=grpo_config.GRPOLoraSettings(
            lora_rank=workload.lora_rank, lora_alpha=workload.lora_alpha, lora_targets=TARGETS
        ),
        parallel=ParallelConfig(),
        output=grpo_config.GRPOOutputConfig(save_dir=str(folder / "run")),
    )


def _ours(workload: Workload, config: Any) -> dict[str, Any]:
    from coati_ext import compat

    compat.apply()
    import torch.distributed as dist
    from colossalai.booster import Booster

    from coati_ext.models.completion_log_probs import disable_dropout
    from coati_ext.plugin import build_plugin
    from coati_ext.trainer import grpo_data, grpo_setup, setup
    from coati_ext.trainer.checks import choose_lora
    from coati_ext.utils.launch import launch

    launch(seed=workload.seed)
    plugin = build_plugin(config.parallel, config.train)
    booster = Booster(plugin=plugin)
    part = setup.describe_model(config, plugin)
    tokenizer = grpo_setup.load_grpo_tokenizer(config)
    data = grpo_data.load_data(config, plugin, tokenizer)
    reward_model = grpo_setup.make_reward_model(config, data.template)
    config = setup.with_defaults(config, plugin, config.num_steps)
    lora, _ = choose_lora(config, part)
    setup.load_model(config, plugin, part)
    setup.choose_trained(config, booster, part, lora)
    disable_dropout(part)
    num_parameters = sum(p.numel() for p in part.parameters() if p.requires_grad)
    optimizer, lr_scheduler = setup.make_optimizer(config, part, config.num_steps)
    model, optimizer, *_ = booster.boost(part, optimizer, lr_scheduler=lr_scheduler)
    trainer = grpo_setup.make_trainer(
        config,
        booster,
        model,
        optimizer,
        lr_scheduler,
        tokenizer,
        reward_model,
        data,
        min_new_tokens=workload.max_seq_len,
    )
    log = _OurLog()
    trainer.fit(workload.num_steps, 1, 1, data.prompts, logger=log, show_progress=False)
    dist.destroy_process_group()
    return measured(workload, log.steps, num_trained_parameters=num_parameters)


class _OurLog:
    """Takes an episode's metrics where a `MetricsLogger` would write them."""

    def __init__(self) -> None:
        self.steps = StepLog()

    def log(self, episode: int, metrics: dict[str, float]) -> None:
        if metrics.get("idle"):
            raise ValueError(f"step {episode} had nothing to learn from: every group was paid alike")
        spent = {phase: metrics[f"seconds/{phase}"] for phase in ("generate", "reward", "log_probs", "train")}
        self.steps.end_step(
            num_generated=round(metrics["tokens_per_s/generate"] * spent["generate"]),
            num_trained=round(metrics["tokens_per_s/train"] * spent["train"]),
            generate=spent["generate"],
            score=spent["reward"],
            log_probs=spent["log_probs"],
            update=spent["train"],
        )


def read_prompts(file: str, num_prompts: int) -> tuple[list[dict[str, Any]], ...]:
    """Turns of the first prompts of a prompt JSONL.

    Raises:
        ValueError: fewer than that, a broken line, or one with tools.
    """
    if num_prompts < 1:
        raise ValueError(f"--num_prompts must be at least 1, got {num_prompts}")
    found = []
    for prompt in iter_prompts(file, require_gold=False):
        if prompt.tools:
            raise ValueError(f"{file}:{prompt.line}: the prompt has tools; the benchmark takes prompts without")
        found.append(prompt.messages)
        if len(found) == num_prompts:
            return tuple(found)
    raise ValueError(f"--num_prompts {num_prompts}: {file} has {len(found)} prompts")


def check_engines(engines: list[str], pretrained: str) -> None:
    """
    Raises:
        ValueError: unknown engines, or TRL, where it is missing, untested or cannot do the same with this model.
    """
    if not set(engines) <= set(ENGINES) or len(set(engines)) < len(engines):
        raise ValueError(f"--engines {' '.join(engines)}: expected some of {', '.join(ENGINES)}, each once")
    others = [name for name in engines if name != "ours"]
    if not others:
        return
    found = installed("trl")
    if found is None or not satisfies(found, TRL_VERSIONS):
        state = "is not installed" if found is None else f"is {found}"
        raise ValueError(
            f"--engines {' '.join(others)}: trl {state}; pip install 'trl{TRL_VERSIONS}' (the extra benchmark), or "
            "measure --engines ours alone"
        )
    if num_experts(read_model_config(pretrained)) != 0:
        raise ValueError(
            f"--pretrained {pretrained} has experts, which TRL's PEFT adapter would not adapt projection by projection "
            "as ours does: the work would not be the same; give a dense model, or measure --engines ours alone"
        )


def compare(workload: Workload, engines: list[str]) -> dict[str, Any]:
    """{"workload", "environment", "engines": results by name, "ratios": ours / each other, "failed": reasons by name}.

    An engine that fails leaves the others their results; so does work that was not the same, but then without ratios.
    """
    results, failed = {}, {}
    for name in engines:
        print(f"--- {name}", flush=True)
        try:
            results[name] = in_own_process(_run_engine, name, workload)
            print(f"{name}: {results[name]['samples_per_s']:.2f} samples/s", flush=True)
        except Exception as error:  # whatever an engine of others raises; the caller sees it in the report
            failed[name] = " ".join(f"{type(error).__name__}: {error}".split())
    ratios = {}
    if difference := different_work(results):
        failed["comparison"] = difference
    elif "ours" in results:
        ratios = {name: _ratios(results["ours"], result) for name, result in results.items() if name != "ours"}
    return {
        "workload": {**asdict(workload), "prompts": len(workload.prompts), "precision": precision()},
        "environment": _environment(),
        "engines": results,
        "ratios": ratios,
        "failed": failed,
    }


def different_work(results: dict[str, dict[str, Any]]) -> str | None:
    """What the engines did not do alike, or None."""
    for key in ("num_trained_tokens", "num_trained_parameters"):
        values = {name: result[key] for name, result in results.items()}
        if len(set(values.values())) > 1:
            return f"the engines did not do the same work: {key} is {values}"
    return None


def _run_engine(name: str, workload: Workload) -> dict[str, Any]:
    # One GPU, before it is looked for: TRL's trainer refuses a process that sees several.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    if name == "ours":
        return ours(workload)
    from coati_ext.benchmark.grpo_trl import trl

    return trl(workload, continuous_batching=name == "trl_continuous")


def _environment() -> dict[str, Any]:
    names = ("torch", "transformers", "peft", "colossalai", "trl", "accelerate")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} thread(s)"
    return {"device": device, "python": platform.python_version(), **{name: installed(name) for name in names}}


_RATES = ("samples_per_s", "generation_tokens_per_s", "training_tokens_per_s")


def _ratios(own: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    return {key: own[key] / other[key] for key in (*_RATES, "peak_bytes")}


def _spread(steps: list[dict[str, float]]) -> float:
    """Of the seconds: far from 1, the machine had other work."""
    seconds = [step["step"] for step in steps]
    return max(seconds) / min(seconds)


def table(report: dict[str, Any]) -> str:
    """The report in lines."""
    work, found, ratios = report["workload"], report["engines"], report["ratios"]
    rows: list[tuple[str, Callable[[dict[str, Any]], str], str | None]] = [
        ("samples/s", lambda e: f"{e['samples_per_s']:,.2f}", "samples_per_s"),
        ("generation tokens/s", lambda e: f"{e['generation_tokens_per_s']:,.0f}", "generation_tokens_per_s"),
        ("training tokens/s", lambda e: f"{e['training_tokens_per_s']:,.0f}", "training_tokens_per_s"),
        ("peak memory, GB", lambda e: f"{e['peak_bytes'] / 1e9:.2f}", "peak_bytes"),
    ]
    for phase in ("step", *PHASES, "other"):
        rows.append((f"seconds, {phase.replace('_', '-')}", lambda e, p=phase: f"{e['seconds'][p]:.3f}", None))
    rows.append(("slowest/fastest step", lambda e: f"{_spread(e['steps']):.2f}", None))
    lines = [
        f"{work['prompts']} prompts x {work['num_generations']} completions of {work['max_seq_len']} tokens, rank "
        f"{work['lora_rank']}, micro-batches of {work['batch_size']}, {work['precision']}; medians of "
        f"{work['steps']} steps after {work['warmup']}",
        ", ".join(f"{name} {value}" for name, value in report["environment"].items() if value),
        f"{'':<22}" + "".join(f"{name:>16}" for name in found) + "".join(f"{f'ours/{name}':>21}" for name in ratios),
    ]
    for label, text, key in rows:
        values = "".join(f"{text(result):>16}" for result in found.values())
        shares = "".join(f"{ratio[key]:>21.2f}" for ratio in ratios.values()) if key else ""
        lines.append(f"{label:<22}{values}{shares}")
    lines += [f"{name} failed: {reason}" for name, reason in report["failed"].items()]
    return "\n".join(lines)
