"""Prove that an exported adapter loads in stock PEFT as it was trained: every tensor, and the same logits.

    python applications/verify_adapter.py --pretrained BASE --adapter DIR

Ends with status 0 and PASS, or 1 and the reasons.
"""

import argparse
import json
import sys
from pathlib import Path

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pretrained", required=True, help="directory of the base model")
    parser.add_argument("--adapter", required=True, help="directory of the adapter")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the base model (default: fp32)")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1, ...")
    parser.add_argument("--tolerance", type=float, help="largest difference of logits (default: by dtype)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")
    args = parser.parse_args(argv)

    import torch

    from coati_ext.checkpoint_io.verify import verify_adapter

    try:
        report = verify_adapter(
            args.pretrained,
            args.adapter,
            dtype=getattr(torch, DTYPES[args.dtype]),
            device=args.device,
            tolerance=args.tolerance,
        )
        if args.json is not None:
            args.json.write_text(json.dumps(report.to_dict(), indent=2) + "\n")
    except (ValueError, OSError) as error:
        print(f"verify_adapter: {error}", file=sys.stderr)
        return 1
    print(report.format())
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
