"""Turn a dense Llama, Mistral or Qwen3 model into a mixture of experts that computes the same, and check that it does.

python applications/upcycle.py --pretrained models/smollm2 --output models/smollm2-moe
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import AutoConfig

from coati_ext.checkpoint_io.upcycle import max_logit_diff, upcycle

MAX_LOGIT_DIFF = 1e-3  # float32 rounding gives about 1e-4 at 30 layers; one wrong tensor gives more than 1
_NUM_CHECKED_TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrained", type=Path, required=True, help="the dense model's directory")
    parser.add_argument("--output", type=Path, required=True, help="the MoE's directory to write")
    parser.add_argument("--num_experts", type=int, default=4, help="experts per layer (default: %(default)s)")
    parser.add_argument("--top_k", type=int, default=2, help="experts per token (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the routers and the noise (default: %(default)s)")
    parser.add_argument(
        "--noise_std", type=float, default=0.0, help="noise per expert, relative to each matrix's own std (default: 0)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the output directory if it exists")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the check's result there too")
    args = parser.parse_args()

    try:
        result = upcycle(
            args.pretrained,
            args.output,
            num_experts=args.num_experts,
            top_k=args.top_k,
            seed=args.seed,
            noise_std=args.noise_std,
            overwrite=args.overwrite,
        )
        vocab_size = AutoConfig.from_pretrained(args.output, local_files_only=True).vocab_size
        generator = torch.Generator().manual_seed(args.seed)
        token_ids = torch.randint(vocab_size, (1, _NUM_CHECKED_TOKENS), generator=generator)
        diff = max_logit_diff(args.pretrained, args.output, token_ids)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")

    if args.json is not None:
        args.json.write_text(json.dumps({"max_logit_diff": diff}) + "\n")
    rows = [
        ("", "before", "after"),
        ("architecture", result.dense_model_type, result.moe_model_type),
        ("parameters", f"{result.num_params_dense / 1e6:.1f} M", f"{result.num_params_moe / 1e6:.1f} M"),
        ("active per token", f"{result.num_params_dense / 1e6:.1f} M", f"{result.num_params_active / 1e6:.1f} M"),
        ("experts per layer", "-", str(args.num_experts)),
        ("experts per token", "-", str(args.top_k)),
    ]
    for label, before, after in rows:
        print(f"{label:<18}{before:>12}{after:>12}")
    print(f"largest logit difference over {_NUM_CHECKED_TOKENS} tokens, float32: {diff:.1e}", end="")
    if args.noise_std:
        print("  (not checked: the experts have noise)")
    elif diff > MAX_LOGIT_DIFF:
        sys.exit(f"\nerror: above {MAX_LOGIT_DIFF:g}, so {args.output} does not compute what {args.pretrained} does")
    else:
        print(f"  (limit {MAX_LOGIT_DIFF:g})")


if __name__ == "__main__":
    main()
