"""Measure what the README claims, on your own machine, as ratios within one run.

python applications/benchmark.py fp8 --work /mnt/disk/bench --size_gb 20
"""

import argparse
import dataclasses
import sys
from pathlib import Path

from coati_ext.checkpoint_io.command import add_work_flags, run_tool, work_options


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    subjects = parser.add_subparsers(dest="subject", required=True)
    fp8 = subjects.add_parser("fp8", help="FP8 -> BF16: the kernel, and whole checkpoints")
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
    args = parser.parse_args(argv)
    if not args.size_gb > 0 or not args.baseline_gb > 0:
        fp8.error(f"--size_gb {args.size_gb} --baseline_gb {args.baseline_gb}: expected numbers above 0")
    if args.work is not None and args.work.exists():
        fp8.error(f"--work {args.work} exists; give a new folder")
    return args


def measure(args: argparse.Namespace) -> int:
    from coati_ext.benchmark import fp8

    options = dataclasses.replace(work_options(args), show_progress=False)
    print(fp8.kernels(options.devices()[0]), flush=True)
    if args.work is not None:
        args.work.mkdir(parents=True)
        size, baseline = int(args.size_gb * 1e9), int(args.baseline_gb * 1e9)
        print(fp8.checkpoints(args.work, args.source, size, baseline, options))
    return 0


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return run_tool("benchmark", lambda: measure(args))


if __name__ == "__main__":
    sys.exit(main())
