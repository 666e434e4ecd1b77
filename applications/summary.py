"""Print and save the summary of a run: what was prepared, trained, exported and verified, and whether it went well.

python applications/summary.py --run runs/quickstart --question Q --before A --after B --seconds 300
"""

import argparse
import json
import sys
from pathlib import Path

from coati_ext.utils.summary import format_summary, summarise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, help="the run's directory; summary.json is written there")
    parser.add_argument("--question", required=True, help="what the model was asked")
    parser.add_argument("--before", required=True, help="the base model's answer")
    parser.add_argument("--after", required=True, help="the fine-tuned model's answer")
    parser.add_argument("--seconds", type=float, required=True, help="how long all of it took")
    args = parser.parse_args()
    try:
        summary = summarise(
            args.run, question=args.question, before=args.before, after=args.after, seconds=args.seconds
        )
    except ValueError as error:
        sys.exit(f"error: {error}")
    (args.run / "summary.json").write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(format_summary(summary))
    sys.exit(1 if summary["problems"] else 0)


if __name__ == "__main__":
    main()
