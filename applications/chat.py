"""Ask a model, with or without an adapter, one question.

python applications/chat.py --pretrained models/smollm2-moe --prompt "What is the capital of France?"
"""

import argparse
import sys

from coati_ext.utils.generate import greedy_reply, load_chat_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrained", required=True, help="the model's directory")
    parser.add_argument("--adapter", help="a PEFT adapter's directory")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max_new_tokens", type=int, default=40, help="(default: %(default)s)")
    args = parser.parse_args()

    try:
        model, tokenizer = load_chat_model(args.pretrained, adapter=args.adapter)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    messages = [{"role": "user", "content": args.prompt}]
    print(greedy_reply(model, tokenizer, messages, max_new_tokens=args.max_new_tokens))


if __name__ == "__main__":
    main()
