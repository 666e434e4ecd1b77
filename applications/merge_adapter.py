"""Merge a LoRA adapter into its base model: W + scaling·B·A, for BF16 and for block-scaled FP8 checkpoints.

    python applications/merge_adapter.py --pretrained DeepSeek-R1 --adapter runs/r1/lora --output DeepSeek-R1-tuned

The output has the base's files, names and dtypes. Run the same command again to continue after an interruption.
"""

import argparse
import sys
from pathlib import Path

from coati_ext.checkpoint_io.command import add_work_flags, run_tool, work_options


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrained", type=Path, required=True, metavar="DIR", help="the base; never written to")
    parser.add_argument("--adapter", type=Path, required=True, metavar="DIR", help="per-expert PEFT adapter")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--output_dtype", choices=("same", "bf16"), default="same", help="bf16: of an FP8 base (default: as the base)"
    )
    add_work_flags(parser)
    return parser.parse_args(argv)


def merge(args: argparse.Namespace) -> int:
    from coati_ext.checkpoint_io.checkpoint import read_checkpoint
    from coati_ext.checkpoint_io.merge import merge_adapter

    report = merge_adapter(
        read_checkpoint(args.pretrained),
        args.adapter,
        args.output,
        output_dtype=args.output_dtype,
        options=work_options(args),
    )
    print(report.format())
    print(f"wrote {args.output}")
    return 0


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return run_tool("merge_adapter", lambda: merge(args))


if __name__ == "__main__":
    sys.exit(main())
