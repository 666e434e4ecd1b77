"""Split a checkpoint into what each rank of a layout holds, or join the parts to the same files again, byte for byte.

    python applications/split_checkpoint.py --pretrained DeepSeek-V3 --layout layout.yaml --output parts
    python applications/split_checkpoint.py --join parts --output DeepSeek-V3

layout.yaml has some of the keys ep, pp, tp, dp and num_layers_per_stage, as `ep: 8`. parts/manifest.json says which
files a rank reads. Run the same command again to continue after an interruption.
"""

import argparse
import sys
from pathlib import Path

from coati_ext.checkpoint_io.command import add_work_flags, run_tool


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--pretrained", type=Path, metavar="DIR", help="the checkpoint to split; never written to")
    source.add_argument("--join", type=Path, metavar="DIR", help="the parts to join; never written to")
    parser.add_argument("--layout", type=Path, metavar="FILE", help="YAML; needed with --pretrained")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    add_work_flags(parser, with_device=False)
    args = parser.parse_args(argv)
    if (args.pretrained is None) == (args.layout is not None):
        parser.error("--layout goes with --pretrained: a split needs it, and --join reads it from the parts")
    return args


def split(args: argparse.Namespace) -> int:
    from coati_ext.checkpoint_io.split import join_checkpoint, read_layout, split_checkpoint
    from coati_ext.utils.sizes import format_bytes

    options = {"num_workers": args.workers, "overwrite": args.overwrite}
    if args.join is not None:
        nbytes = join_checkpoint(args.join, args.output, **options)
        print(f"wrote {args.output}: {format_bytes(nbytes)} of weights")
        return 0
    report = split_checkpoint(args.pretrained, args.output, read_layout(args.layout), **options)
    print(report.format())
    print(f"wrote {args.output}")
    return 0


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return run_tool("split_checkpoint", lambda: split(args))


if __name__ == "__main__":
    sys.exit(main())
