"""Measure what the README claims, on your own machine, as ratios within one run.

python applications/benchmark.py fp8 --work /mnt/disk/bench --size_gb 20
"""

import argparse
import sys
from pathlib import Path


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subjects = parser.add_subparsers(dest="subject", required=True)
    fp8 = subjects.add_parser("fp8", help="FP8 -> BF16: the kernel, and whole checkpoints")
    fp8.add_argument(
        "--work", type=Path, metavar="DIR", help="new folder on the disk to measure (default: kernel only)"
    )
    fp8.add_argument("--source", type=Path, metavar="DIR", help="where the checkpoint is, or is written to (--work)")
    fp8.add_argument("--size_gb", type=float, default=20, help="of the synthetic FP8 checkpoint (default: %(default)s)")
    fp8.add_argument(
        "--baseline_gb", type=float, default=5, help="how much of it goes the published way (default: %(default)s)"
    )
    fp8.add_argument("--device", default="auto", help="auto (all GPUs, or else the CPU; default), cpu, cuda, cuda:N")
    fp8.add_argument("--workers", type=int, metavar="N", help="threads (default: one a CPU core, at most 16)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)

    from coati_ext.benchmark import fp8
    from coati_ext.checkpoint_io.rewrite import WorkOptions

    try:
        options = WorkOptions(device=args.device, num_workers=args.workers, show_progress=False)
        print(fp8.kernels(options.devices()[0]), flush=True)
        if args.work is not None:
            args.work.mkdir(parents=True)
            size, baseline = int(args.size_gb * 1e9), int(args.baseline_gb * 1e9)
            print(fp8.checkpoints(args.work, args.source, size, baseline, options))
    except (OSError, ValueError) as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
