"""A complete tiny model directory (weights, real trained tokenizer, chat template) and chat data, for command tests."""

import json
from pathlib import Path

from tiny_models import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATS = [(f"What is {a} plus {b}?", f"It is {a + b}.") for a in range(3) for b in range(4)]


def make_model_dir(folder: Path, family: str = "mixtral", **config) -> tuple[Path, Path]:
    """(model directory, JSONL of 12 conversations) under `folder`."""
    data = folder / "chats.jsonl"
    lines = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in CHATS]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenizer = _train_tokenizer()
    base = folder / "base"
    tiny_model(family, vocab_size=len(tokenizer), **config).save_pretrained(base)
    tokenizer.save_pretrained(base)
    return base, data


def _train_tokenizer() -> PreTrainedTokenizerFast:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    trained.train_from_iterator([text for chat in CHATS for text in chat], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    return tokenizer
