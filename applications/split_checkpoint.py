"""Split a checkpoint into what each rank of a layout holds, or join the parts to the same files again, byte for byte.

    python applications/split_checkpoint.py --pretrained DeepSeek-V3 --layout layout.yaml --output parts
    python applications/split_checkpoint.py --join parts --output DeepSeek-V3

layout.yaml has some of the keys ep, pp, tp, dp and num_layers_per_stage, as `ep: 8`. parts/manifest.json says which
files a rank reads. Run the same command again to continue after an interruption.
"""

import argparse
import sys
from pathlib import Path


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--pretrained", type=Path, metavar="DIR", help="the checkpoint to split; never written to")
    source.add_argument("--join", type=Path, metavar="DIR", help="the parts to join; never written to")
    parser.add_argument("--layout", type=Path, metavar="FILE", help="YAML; needed with --pretrained")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--workers", type=int, metavar="N", help="threads (default: one a CPU core, at most 16)")
    parser.add_argument("--overwrite", action="store_true", help="replace the output directory if it exists")
    args = parser.parse_args(argv)
    if (args.pretrained is None) == (args.layout is not None):
        parser.error("--layout goes with --pretrained: a split needs it, and --join reads it from the parts")
    if args.workers is not None and args.workers < 1:
        parser.error(f"--workers {args.workers}: expected 1 or more")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)

    from coati_ext.checkpoint_io.split import join_checkpoint, read_layout, split_checkpoint

    options = {"num_workers": args.workers, "overwrite": args.overwrite}
    try:
        if args.join is not None:
            nbytes = join_checkpoint(args.join, args.output, **options)
            print(f"wrote {args.output}: {nbytes / 1e9:.3f} GB of weights")
        else:
            report = split_checkpoint(args.pretrained, args.output, read_layout(args.layout), **options)
            print(report.format())
            print(f"wrote {args.output}")
    except (OSError, RuntimeError, ValueError) as error:
        print(f"split_checkpoint: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
