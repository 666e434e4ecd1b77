"""Make prompts with right answers for reinforcement learning, from GSM8K- or MATH-style JSONL or from a task.

    python applications/prepare_dataset.py --input gsm8k/train.jsonl --output data/gsm8k.jsonl --number_gold
    python applications/prepare_dataset.py --task builtin:arithmetic --num_test 64 --output data/sums.jsonl
    python applications/prepare_dataset.py --task chain_sum,gcd --num_samples 4000 --output data/gym.jsonl

Drops what has no use, says how much and why, and shows the first prompt. A broken line stops it (--skip_bad_lines).
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from coati_ext.checkpoint_io.command import run_tool


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=argparse.SUPPRESS
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="FILE", help="the prompts, as JSONL")
    source = parser.add_argument_group("from a file")
    source.add_argument(
        "--input", type=Path, metavar="FILE", help="lines of question/answer, problem/solution or messages"
    )
    source.add_argument("--question_field", metavar="NAME", help="(default: question or problem)")
    source.add_argument(
        "--answer_field", metavar="NAME", help="has the gold after #### or in \\boxed{} (default: answer or solution)"
    )
    source.add_argument("--gold_field", metavar="NAME", help="holds the bare gold (default: gt_answer if there is one)")
    task = parser.add_argument_group("from tasks")
    task.add_argument(
        "--task",
        dest="tasks",
        type=lambda text: tuple(text.split(",")),
        metavar="NAME[,NAME]",
        help="builtin:arithmetic, or tasks of reasoning-gym (pip install 'reasoning-gym>=0.1.19,<0.2')",
    )
    task.add_argument(
        "--num_samples", type=int, metavar="N", help="of all tasks together, duplicates among them (default: 1000)"
    )
    task.add_argument("--seed", type=int, metavar="N", help="(default: 0)")
    task.add_argument("--task_options", type=_option, nargs="+", metavar="KEY=VALUE", help="of one task: max_number=99")
    prompt = parser.add_argument_group("the prompt")
    prompt.add_argument("--instruction", metavar="TEXT", help="put behind each question")
    prompt.add_argument("--system_message", metavar="TEXT", help="put before prompts without a system turn")
    choice = parser.add_argument_group("which are kept")
    choice.add_argument("--skip_bad_lines", action="store_true", help="drop and count broken lines")
    choice.add_argument("--number_gold", action="store_true", help="drop golds that are not one number")
    choice.add_argument(
        "--exclude", type=Path, nargs="+", metavar="FILE", help="prompt files whose questions are left out"
    )
    choice.add_argument("--shuffle_seed", type=int, metavar="N", help="shuffle (default: the order of the input)")
    choice.add_argument("--max_samples", type=int, metavar="N", help="the first N, held-out ones included")
    choice.add_argument("--num_test", type=int, metavar="N", help="hold N out")
    choice.add_argument("--test_fraction", type=float, metavar="X", help="hold this part out")
    choice.add_argument("--test_output", type=Path, metavar="FILE", help="held-out prompts (default: OUTPUT_test)")
    add("--overwrite", action="store_true", help="replace the files if they exist")
    return parser.parse_args(argv)


def _option(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def run(flags: dict[str, Any]) -> int:
    from coati_ext.dataset.prepare import PrepareConfig, prepare

    exclude, options = tuple(flags.pop("exclude", ())), dict(flags.pop("task_options", ()))
    print(prepare(PrepareConfig(**flags, exclude=exclude, task_options=options)).format())
    return 0


def main(argv: list[str] | None = None) -> int:
    flags = vars(parse(argv))
    return run_tool("prepare_dataset", lambda: run(flags))


if __name__ == "__main__":
    sys.exit(main())
