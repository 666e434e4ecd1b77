"""Convert a LoRA adapter of an MoE between per-expert tensors, PEFT's stacked form and the vLLM form.

    python applications/convert_adapter.py --adapter DIR --output O --to per-expert --pretrained BASE

Reads any of the three, and stacked adapters of PEFT before 0.19. What cannot be converted is refused by name; where a
value has to be rounded, that is told.
"""

import argparse
import sys
from pathlib import Path

from coati_ext.checkpoint_io.command import run_tool


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", type=Path, required=True, help="directory of the adapter to read")
    parser.add_argument("--output", type=Path, required=True, help="directory to write")
    parser.add_argument(
        "--to",
        choices=("per-expert", "stacked", "vllm"),
        required=True,
        help="per-expert: 2-D tensors of every expert, configs for transformers 5 and, in transformers4/, for vLLM; "
        "stacked: as PEFT >= 0.19 saves target_parameters; vllm: per-expert tensors with the config for vLLM alone",
    )
    parser.add_argument("--pretrained", help="directory of the base model (default: the one that the adapter names)")
    parser.add_argument(
        "--peft-orientation",
        "--peft_orientation",
        choices=("0.18", "0.19"),
        help="of a stacked adapter: before PEFT 0.19, or from it on (default: as shapes and peft_version tell)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the output directory if it exists")
    args = parser.parse_args(argv)
    return run_tool("convert_adapter", lambda: convert(args))


def convert(args: argparse.Namespace) -> int:
    from coati_ext.checkpoint_io.convert_adapter import convert_adapter

    report = convert_adapter(
        args.adapter,
        args.output,
        to=args.to,
        pretrained=args.pretrained,
        peft_orientation=args.peft_orientation,
        overwrite=args.overwrite,
    )
    print(report.format())
    return 0


if __name__ == "__main__":
    sys.exit(main())
