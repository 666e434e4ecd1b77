"""One rank's share of a layout, trained on one GPU with random weights: whether it fits, and how long it computes.

python applications/rehearse.py --model deepseek_v3 --world_size 8 --ep 8 --frozen_dtype fp8 -g
"""

import argparse
import json
import sys
from pathlib import Path

from coati_ext.checkpoint_io.command import run_tool


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="deepseek_v3, qwen3_30b_a3b, or a config.json; no weights are read")
    add("--num_layers", type=int, help="of the model (default: all)")
    numbers = {
        "world_size": (1, "processes of the layout"),
        "ep": (1, "ranks that share the experts of a layer"),
        "pp": (1, "pipeline stages"),
        "rank": (0, "of the process that is rehearsed; with --pp, world_size / pp ranks are a stage's"),
        "lora_rank": (8, "of the adapter"),
        "batch_size": (1, "rows of a data-parallel rank in a step"),
        "microbatch_size": (1, "rows that go through the pipeline at a time"),
        "max_length": (4096, "tokens of a row"),
    }
    for name, (default, help) in numbers.items():
        add(f"--{name}", type=int, default=default, help=f"{help} (default: %(default)s)")
    add("--lora_targets", nargs="+", default=["mlp"], help="as of lora_finetune.py (default: mlp)")
    add("--frozen_dtype", help="fp8: experts and the layers' linears in FP8, as DeepSeek publishes them")
    add("-g", "--use_grad_checkpoint", action="store_true", help="recompute activations")
    add("--fp8_compute", action="store_true", help="as of lora_finetune.py")
    add("--gpu_gb", type=float, help="GiB that torch may take, as on a smaller GPU (default: all)")
    add("--torch_compile", action="store_true", help="as of lora_finetune.py; for GPUs")
    add(
        "--routing", default="balanced", help="balanced, uniform, skewed, single, or a JSON file of rows of each expert"
    )
    add("--json", type=Path, metavar="FILE", help="also write all numbers")
    return parser.parse_args(argv)


def rehearse(args: argparse.Namespace) -> int:
    import torch

    from coati_ext.benchmark.model_configs import model_config
    from coati_ext.benchmark.rehearse import Layout, table
    from coati_ext.benchmark.rehearse import rehearse as run

    given = {name: value for name, value in vars(args).items() if name in Layout.__dataclass_fields__}
    given |= {"model": model_config(args.model, args.num_layers), "lora_targets": tuple(args.lora_targets)}
    try:
        report = run(Layout(**given))
    except torch.OutOfMemoryError as error:
        raise ValueError(f"the share does not fit this GPU: {str(error).partition(' GPU ')[0]}") from None
    print(f"{report['device']}, {args.model}, LoRA rank {args.lora_rank} on {' '.join(args.lora_targets)}")
    print(table(report))
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return run_tool("rehearse", lambda: rehearse(args))


if __name__ == "__main__":
    sys.exit(main())
