"""What the commands of the checkpoint tools have in common: their flags, and errors that reach the user as one line."""

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coati_ext.checkpoint_io.rewrite import WorkOptions


def add_work_flags(parser: argparse.ArgumentParser, *, with_device: bool = True, with_overwrite: bool = True) -> None:
    """The flags of `WorkOptions`."""
    if with_device:
        help = "auto (all GPUs, or else the CPU; default), cpu, cuda, cuda:N"
        parser.add_argument("--device", default="auto", help=help)
    parser.add_argument("--workers", type=_positive, metavar="N", help="threads (default: one a CPU core, at most 16)")
    if with_overwrite:
        parser.add_argument("--overwrite", action="store_true", help="replace the output directory if it exists")


def work_options(args: argparse.Namespace) -> "WorkOptions":
    """The options that the flags say."""
    from coati_ext.checkpoint_io.rewrite import WorkOptions

    return WorkOptions(device=args.device, num_workers=args.workers, overwrite=getattr(args, "overwrite", False))


def run_tool(name: str, work: Callable[[], int]) -> int:
    """The exit code of `work`; 1 and one line for what the user can mend, 130 for Ctrl-C."""
    try:
        return work()
    except (OSError, RuntimeError, ValueError) as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted; run the same command again to continue", file=sys.stderr)
        return 130


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text!r}")
    return int(text)
