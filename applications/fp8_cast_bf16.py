"""Convert a block-scaled FP8 checkpoint (as DeepSeek-V3 and R1 are published) to BF16: a complete model directory.

    python applications/fp8_cast_bf16.py --input-fp8-hf-path DeepSeek-R1 --output-bf16-hf-path DeepSeek-R1-bf16

Streams, on all GPUs or else on the CPU, with memory that does not grow with the checkpoint. Run the same command again
to continue after an interruption.
"""

import argparse
import sys
from pathlib import Path


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
    parser.add_argument("--device", default="auto", help="auto (all GPUs, or else the CPU; default), cpu, cuda, cuda:N")
    parser.add_argument("--workers", type=int, metavar="N", help="threads (default: one a CPU core, at most 16)")
    parser.add_argument(
        "--verify",
        nargs="?",
        const="sample",
        choices=("sample", "all"),
        help="compare the output with a float64 dequantisation; an output that is complete is only compared",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the output directory if it exists")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)

    from coati_ext.checkpoint_io.checkpoint import read_checkpoint
    from coati_ext.checkpoint_io.fp8_to_bf16 import fp8_to_bf16
    from coati_ext.checkpoint_io.hf_directory import CONFIG_NAME
    from coati_ext.checkpoint_io.rewrite import WorkOptions
    from coati_ext.checkpoint_io.verify_fp8 import verify_fp8_to_bf16

    output = args.output_bf16_hf_path
    options = WorkOptions(device=args.device, num_workers=args.workers, overwrite=args.overwrite)
    try:
        source = read_checkpoint(args.input_fp8_hf_path)
        if args.verify and not args.overwrite and (output / CONFIG_NAME).is_file():
            print(f"{output} exists: only comparing it")
        else:
            fp8_to_bf16(source, output, mtp=args.mtp, options=options)
            print(f"wrote {output}")
        if args.verify:
            report = verify_fp8_to_bf16(source, output, amount=args.verify, mtp=args.mtp, options=options)
            print(report.format())
            return 1 if report.problems else 0
    except (OSError, RuntimeError, ValueError) as error:
        print(f"fp8_cast_bf16: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
