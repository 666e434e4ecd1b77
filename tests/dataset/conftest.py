# ruff: noqa: RUF001  (DeepSeek's tokens are written with a full-width bar)
"""Small real tokenizers (byte-level BPE, trained here) with the chat templates of the main families."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The coati is a mammal of the raccoon family. What is a coati? A coati lives in bands, and it climbs trees.",
    "User: hello there\nAssistant: Hello there, how can I help?\n\n  Yes. No. Sure.\n",
    "system user assistant tool content role 2+2=4 {'name': 'weather'} <think>\nhmm\n</think>\n\nanswer",
] * 4

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# SmolLM2-Instruct's: ChatML with a system prompt of its own when the conversation has none.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{% for m in messages %}{% set c = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' "
    "+ m['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.first %}{% set c = bos_token + c %}{% endif %}{{ c }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ m['content'] }}"
    "{% elif m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}"
    "{% elif m['role'] == 'assistant' and m['content'] is not none %}"
    "{{ '<｜Assistant｜>' + m['content'] + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)
# DeepSeek-R1's: drops the reasoning of every turn, and opens <think> in the generation prompt only.
DEEPSEEK_R1 = DEEPSEEK.replace("m['content'] + '<｜end", "m['content'].split('</think>')[-1] + '<｜end").replace(
    "{{ '<｜Assistant｜>' }}", "{{ '<｜Assistant｜><think>\\n' }}"
)
# Qwen3's ways: tools in the system turn, tool calls as JSON, reasoning kept in the last turn only.
QWEN3 = (
    "{% if tools %}{{ '<|im_start|>system\\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{% set content = m.content %}"
    "{% if m.role == 'assistant' %}{% set reasoning = '' %}"
    "{% if '</think>' in content %}{% set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\\n' }}"
    "{% if loop.last %}{{ '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}{% endif %}{{ content }}"
    "{% for call in m.tool_calls or [] %}"
    '{{ \'\\n<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
GENERATION = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# GLM's way: no end-of-turn token, the next role marker ends the turn.
GLM = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
# No special token at all, and a header that ends in a space: BPE merges it with the first word of the answer.
PLAIN = (
    "{% for m in messages %}{{ m['role'] | capitalize + ': ' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)

SPECIAL = {
    CHATML: ("<|im_start|>", "<|im_end|>"),
    MISTRAL: ("<s>", "</s>"),
    LLAMA3: ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    DEEPSEEK: ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    GLM: ("[gMASK]", "<|endoftext|>", "<|user|>", "<|assistant|>"),
}
SPECIAL |= {template: SPECIAL[CHATML] for template in (SMOLLM2, QWEN3, GENERATION)}
SPECIAL |= {DEEPSEEK_R1: SPECIAL[DEEPSEEK], PLAIN: SPECIAL[MISTRAL]}


def make_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """The template's first special token is bos, the second eos."""
    special = SPECIAL[template]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=special[0], eos_token=special[1], extra_special_tokens=list(special[2:])
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    """Write lines (bytes and str as they are, anything else as JSON) to a file and return its path."""

    def write(*lines: Any) -> str:
        path = tmp_path / "chats.jsonl"
        encoded = (
            line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
            for line in lines
        )
        path.write_bytes(b"".join(line + b"\n" for line in encoded))
        return str(path)

    return write


@pytest.fixture
def templates() -> dict[str, str]:
    return {
        "chatml": CHATML,
        "smollm2": SMOLLM2,
        "mistral": MISTRAL,
        "llama3": LLAMA3,
        "deepseek": DEEPSEEK,
        "deepseek_r1": DEEPSEEK_R1,
        "qwen3": QWEN3,
        "generation": GENERATION,
        "glm": GLM,
        "plain": PLAIN,
    }


@pytest.fixture
def tokenizer_for(templates: dict[str, str]) -> Callable[[str], PreTrainedTokenizerFast]:
    return lambda name: make_tokenizer(templates[name])
