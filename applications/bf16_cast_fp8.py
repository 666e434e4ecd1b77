"""Quantise a BF16 checkpoint to block-scaled FP8 (e4m3, 128 x 128), as DeepSeek publishes and vLLM and SGLang serve it.

    python applications/bf16_cast_fp8.py --input-bf16-hf-path R1-tuned --output-fp8-hf-path R1-fp8 --like DeepSeek-R1

Ends with the error that this made. Run the same command again to continue after an interruption.
"""

import argparse
import sys
from pathlib import Path

from coati_ext.checkpoint_io.command import add_work_flags, run_tool, work_options


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input-bf16-hf-path", type=Path, required=True, metavar="DIR", help="never written to")
    parser.add_argument("--output-fp8-hf-path", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--like",
        type=Path,
        metavar="DIR",
        help="an FP8 checkpoint of the same model: its set of FP8 weights and its quantization_config (default: all "
        "linear weights but embeddings, heads, routers and vision, in blocks of 128 x 128)",
    )
    parser.add_argument(
        "--scale_fmt",
        choices=("float32", "ue8m0"),
        help="without --like: ue8m0 makes scales powers of two, as DeepSeek-V3.1 has them (default: float32)",
    )
    add_work_flags(parser)
    args = parser.parse_args(argv)
    if args.like is not None and args.scale_fmt is not None:
        parser.error("--scale_fmt and --like: the scale format comes with --like; leave one of them out")
    return args


def convert(args: argparse.Namespace) -> int:
    from coati_ext.checkpoint_io.bf16_to_fp8 import bf16_to_fp8
    from coati_ext.checkpoint_io.checkpoint import read_checkpoint

    error = bf16_to_fp8(
        read_checkpoint(args.input_bf16_hf_path),
        args.output_fp8_hf_path,
        like=None if args.like is None else read_checkpoint(args.like),
        scale_format=args.scale_fmt or "float32",
        options=work_options(args),
    )
    print(error.format())
    print(f"wrote {args.output_fp8_hf_path}")
    return 0


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return run_tool("bf16_cast_fp8", lambda: convert(args))


if __name__ == "__main__":
    sys.exit(main())
