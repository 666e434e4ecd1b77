"""Measure what the README claims, on your own machine, as ratios within one run.

python applications/benchmark.py fp8 --work /mnt/disk/bench --size_gb 20
python applications/benchmark.py grpo --pretrained MODEL --prompt_dataset PROMPTS.jsonl
python applications/benchmark.py generation
python applications/benchmark.py experts --shapes qwen3_30b_a3b --tokens 8192
python applications/benchmark.py step --num_layers 8
python applications/benchmark.py loss --tokens 8192
python applications/benchmark.py ep --shapes deepseek_v3
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TypeVar

from coati_ext.checkpoint_io.command import add_work_flags, run_tool, work_options

Shape = TypeVar("Shape")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subjects = parser.add_subparsers(dest="subject", required=True)
    fp8 = subjects.add_parser("fp8", help="FP8 -> BF16: the kernel, and whole checkpoints")
    add_fp8_flags(fp8)
    add_grpo_flags(subjects.add_parser("grpo", help="steps of GRPO: ours, and TRL's GRPOTrainer on the same work"))
    add_generation_flags(subjects.add_parser("generation", help="completions with and without CUDA graphs"))
    add_experts_flags(subjects.add_parser("experts", help="a block of experts with LoRA, and what else there is"))
    add_step_flags(subjects.add_parser("step", help="whole training steps of a mixture of experts: ours, and PEFT's"))
    add_loss_flags(subjects.add_parser("loss", help="LM head and cross-entropy, and what else there is"))
    add_ep_flags(subjects.add_parser("ep", help="expert parallelism on the GPUs of this host, against their links"))
    args = parser.parse_args(argv)
    if args.subject == "fp8":
        if not args.size_gb > 0 or not args.baseline_gb > 0:
            fp8.error(f"--size_gb {args.size_gb} --baseline_gb {args.baseline_gb}: expected numbers above 0")
        if args.work is not None and args.work.exists():
            fp8.error(f"--work {args.work} exists; give a new folder")
    return args


def add_fp8_flags(fp8: argparse.ArgumentParser) -> None:
    fp8.add_argument(
        "--work", type=Path, metavar="DIR", help="new folder on the disk to measure (default: kernel only)"
    )
    fp8.add_argument("--source", type=Path, metavar="DIR", help="where the checkpoint is, or is written to (--work)")
    fp8.add_argument(
        "--size_gb", type=float, default=20, help="of the FP8 checkpoint, at least 4.9 (default: %(default)s)"
    )
    fp8.add_argument(
        "--baseline_gb", type=float, default=5, help="how much of it goes the published way (default: %(default)s)"
    )
    add_work_flags(fp8, with_overwrite=False)


def add_grpo_flags(grpo: argparse.ArgumentParser) -> None:
    grpo.add_argument("--pretrained", required=True, metavar="DIR", help="Hugging Face directory of a dense model")
    grpo.add_argument(
        "--prompt_dataset", required=True, metavar="FILE", help="prompt JSONL; its first prompts are used"
    )
    numbers = {
        "num_prompts": (8, "prompts of a step"),
        "num_generations": (8, "completions of each"),
        "max_seq_len": (64, "tokens of every completion: none ends before"),
        "batch_size": (8, "completions of a micro-batch of training"),
        "steps": (3, "measured steps, each of one optimizer step"),
        "warmup": (1, "steps before them, at least 1"),
        "lora_rank": (16, "of the adapter on q, k, v, o, gate, up and down"),
    }
    for name, (default, help) in numbers.items():
        grpo.add_argument(f"--{name}", type=int, default=default, help=f"{help} (default: %(default)s)")
    grpo.add_argument(
        "--engines",
        nargs="+",
        default=["ours", "trl"],
        help="ours, trl (which generates with transformers' generate), trl_continuous (with its continuous batching); "
        "default: ours trl",
    )
    grpo.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers, step by step")


def add_generation_flags(generation: argparse.ArgumentParser) -> None:
    numbers = {
        "num_prompts": (64, "prompts, of 30 to 120 random tokens"),
        "num_generations": (8, "completions of each"),
        "max_seq_len": (256, "tokens of every completion"),
        "num_experts": (0, "of a mixture of experts; 0: a dense model"),
    }
    for name, (default, help) in numbers.items():
        generation.add_argument(f"--{name}", type=int, default=default, help=f"{help} (default: %(default)s)")


def add_experts_flags(experts: argparse.ArgumentParser) -> None:
    experts.add_argument("--shapes", nargs="+", metavar="NAME", help="of a block (default: all that there are)")
    experts.add_argument("--tokens", nargs="+", type=int, default=[8192], help="of a step (default: 8192)")
    experts.add_argument(
        "--routings", nargs="+", default=["balanced", "uniform", "skewed"],
        help="balanced, uniform (each token draws), skewed (by Zipf's law), single (one expert has all)",
    )  # fmt: skip
    experts.add_argument(
        "--engines", nargs="+", default=["ours", "frozen", "peft"],
        help="ours, ours_fp8 (frozen weights in FP8), ours_fp8_compute (and FP8 products forward), frozen "
        "(transformers' grouped_mm without LoRA), peft (target_parameters on it), peft_eager, loop (over experts, as "
        "ColossalAI's); default: ours frozen peft",
    )  # fmt: skip
    experts.add_argument("--rank", type=int, default=8, help="of the LoRA (default: %(default)s)")
    experts.add_argument("--steps", type=int, default=7, help="of which the median is told (default: %(default)s)")
    experts.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers")


def add_step_flags(step: argparse.ArgumentParser) -> None:
    step.add_argument("--model", default="qwen3_30b_a3b", help="its name, or a config.json (default: %(default)s)")
    step.add_argument("--num_layers", type=int, help="of the model (default: all, 61 GB of weights of Qwen3-30B-A3B)")
    numbers = {
        "batch_size": (4, "rows of a step"),
        "max_length": (2048, "tokens of a row"),
        "lora_rank": (8, "of the adapter on attention and experts"),
        "steps": (5, "of which the median is told"),
    }
    for name, (default, help) in numbers.items():
        step.add_argument(f"--{name}", type=int, default=default, help=f"{help} (default: %(default)s)")
    step.add_argument(
        "--engines", nargs="+", default=["ours", "peft"],
        help="ours, ours_compiled (with --torch_compile), peft, peft_compiled (the same modules compiled); default: "
        "ours peft",
    )  # fmt: skip
    step.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers")


def add_loss_flags(loss: argparse.ArgumentParser) -> None:
    loss.add_argument("--shapes", nargs="+", metavar="NAME", help="of a head (default: all that there are)")
    loss.add_argument("--tokens", nargs="+", type=int, default=[8192], help="of a step (default: 8192)")
    loss.add_argument(
        "--engines", nargs="+", default=["ours", "logits"],
        help="ours, logits (all of them, as transformers), compiled (these by torch.compile), liger (its fused linear "
        "cross-entropy, if installed); default: ours logits",
    )  # fmt: skip
    loss.add_argument("--train_head", action="store_true", help="with the head's gradient (default: a frozen one)")
    loss.add_argument("--steps", type=int, default=7, help="of which the median is told (default: %(default)s)")
    loss.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers")


def add_ep_flags(ep: argparse.ArgumentParser) -> None:
    ep.add_argument("--shapes", nargs="+", metavar="NAME", help="of a block (default: all that there are)")
    ep.add_argument("--tokens", nargs="+", type=int, default=[8192], help="of a step of each rank (default: 8192)")
    ep.add_argument(
        "--routings", nargs="+", default=["balanced", "uniform", "skewed"],
        help="balanced, uniform (each token draws), skewed (by Zipf's law), single (one expert has all)",
    )  # fmt: skip
    ep.add_argument("--ranks", type=int, help="processes to start (default: one a visible GPU; with gloo 2)")
    ep.add_argument("--backend", default="nccl", help="nccl (GPUs; default) or gloo (CPUs)")
    ep.add_argument("--steps", type=int, default=7, help="of which the median is told (default: %(default)s)")
    ep.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers")


def measure(args: argparse.Namespace) -> int:
    measures = {
        "fp8": measure_fp8,
        "grpo": measure_grpo,
        "generation": measure_generation,
        "experts": measure_experts,
        "step": measure_step,
        "loss": measure_loss,
        "ep": measure_ep,
    }
    return measures[args.subject](args)


def measure_experts(args: argparse.Namespace) -> int:
    from coati_ext.benchmark import experts

    shapes = _shapes(args.shapes, experts.SHAPES)
    _at_least_1(rank=args.rank, steps=args.steps, tokens=min(args.tokens))
    report = experts.compare(
        shapes, args.tokens, args.routings, args.engines, rank=args.rank, steps=args.steps,
        show=lambda line: print(line, flush=True),
    )  # fmt: skip
    write_json(args.json, report)
    return 1 if report["failed"] else 0


def measure_loss(args: argparse.Namespace) -> int:
    from coati_ext.benchmark import loss

    shapes = _shapes(args.shapes, loss.SHAPES)
    _at_least_1(steps=args.steps, tokens=min(args.tokens))
    report = loss.compare(
        shapes, args.tokens, args.engines, train_head=args.train_head, steps=args.steps,
        show=lambda line: print(line, flush=True),
    )  # fmt: skip
    write_json(args.json, report)
    return 1 if report["failed"] else 0


def measure_ep(args: argparse.Namespace) -> int:
    from coati_ext.benchmark import ep, experts

    shapes = _shapes(args.shapes, experts.SHAPES)
    numbers = {name: getattr(args, name) for name in ("ranks", "backend", "steps")}
    write_json(args.json, ep.compare(shapes, args.tokens, args.routings, **numbers))
    return 0


def _shapes(names: list[str] | None, known: dict[str, Shape]) -> dict[str, Shape]:
    """Those of these names, by default all."""
    names = list(known) if names is None else names
    if unknown := set(names) - set(known):
        raise ValueError(f"--shapes: unknown {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return {name: known[name] for name in names}


def _at_least_1(**flags: int) -> None:
    for name, value in flags.items():
        if value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")


def measure_step(args: argparse.Namespace) -> int:
    from coati_ext.benchmark import step
    from coati_ext.benchmark.model_configs import model_config

    numbers = {name: getattr(args, name) for name in ("batch_size", "max_length", "lora_rank", "steps")}
    work = step.Work(model=model_config(args.model, args.num_layers), **numbers)
    report = step.compare(work, args.engines, show=lambda line: print(line, flush=True))
    write_json(args.json, report)
    return 1 if report["failed"] else 0


def write_json(path: Path | None, report: dict) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2) + "\n")


def measure_generation(args: argparse.Namespace) -> int:
    from coati_ext.benchmark import generation

    print(generation.compare(args.num_prompts, args.num_generations, args.max_seq_len, args.num_experts))
    return 0


def measure_fp8(args: argparse.Namespace) -> int:
    from coati_ext.benchmark import fp8

    options = dataclasses.replace(work_options(args), show_progress=False)
    print(fp8.kernels(options.devices()[0]), flush=True)
    if args.work is not None:
        args.work.mkdir(parents=True)
        size, baseline = int(args.size_gb * 1e9), int(args.baseline_gb * 1e9)
        print(fp8.checkpoints(args.work, args.source, size, baseline, options))
    return 0


def measure_grpo(args: argparse.Namespace) -> int:
    from coati_ext.benchmark import grpo

    grpo.check_engines(args.engines, args.pretrained)
    sizes = ("num_generations", "max_seq_len", "batch_size", "steps", "warmup", "lora_rank")
    workload = grpo.Workload(
        pretrained=args.pretrained,
        prompts=grpo.read_prompts(args.prompt_dataset, args.num_prompts),
        **{name: getattr(args, name) for name in sizes},
    )
    report = grpo.compare(workload, args.engines)
    write_json(args.json, report)
    print(grpo.table(report))
    return 1 if report["failed"] else 0


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return run_tool("benchmark", lambda: measure(args))


if __name__ == "__main__":
    sys.exit(main())
