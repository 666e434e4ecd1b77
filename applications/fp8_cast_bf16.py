"""Convert a block-scaled FP8 checkpoint (as DeepSeek-V3 and R1 are published) to BF16: a complete model directory.

    python applications/fp8_cast_bf16.py --input-fp8-hf-path DeepSeek-R1 --output-bf16-hf-path DeepSeek-R1-bf16

Streams, on all GPUs or else on the CPU, with memory that does not grow with the checkpoint. Run the same command again
to continue after an interruption.
"""

import argparse
import sys
from pathlib import Path

from coati_ext.checkpoint_io.command import add_work_flags, run_tool, work_options


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input-fp8-hf-path", type=Path, required=True, metavar="DIR", help="never written to")
    parser.add_argument("--output-bf16-hf-path", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--mtp",
        choices=("keep", "drop"),
        default="keep",
        help="multi-token-prediction layers, which transformers does not load (default: keep)",
    )
    parser.add_argument(
        "--verify",
        nargs="?",
        const="sample",
        choices=("sample", "all"),
        help="compare the output with a float64 dequantisation: a sample of every shard (default), or all; an output "
        "that is complete is only compared",
    )
    add_work_flags(parser)
    return parser.parse_args(argv)


def convert(args: argparse.Namespace) -> int:
    from coati_ext.checkpoint_io.checkpoint import read_checkpoint
    from coati_ext.checkpoint_io.fp8_to_bf16 import fp8_to_bf16
    from coati_ext.checkpoint_io.hf_directory import CONFIG_NAME
    from coati_ext.checkpoint_io.verify_fp8 import verify_fp8_to_bf16

    source, output, options = read_checkpoint(args.input_fp8_hf_path), args.output_bf16_hf_path, work_options(args)
    if args.verify and not args.overwrite and (output / CONFIG_NAME).is_file():
        print(f"{output} exists: only comparing it")
    else:
        fp8_to_bf16(source, output, mtp=args.mtp, options=options)
        print(f"wrote {output}")
    if not args.verify:
        return 0
    report = verify_fp8_to_bf16(source, output, amount=args.verify, mtp=args.mtp, options=options)
    print(report.format())
    return 1 if report.problems else 0


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return run_tool("fp8_cast_bf16", lambda: convert(args))


if __name__ == "__main__":
    sys.exit(main())
