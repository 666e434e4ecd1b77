# ruff: noqa: RUF001  (DeepSeek's tokens are written with a full-width bar)
"""Which tokens are supervised, for the chat templates of the main families, by decoding them."""

import re

import pytest
from transformers import PreTrainedTokenizer

from coati_ext.dataset import RawConversationDataset

USER, ANSWER = "What is a coati?", "A coati is a mammal."
SINGLE = [{"role": "user", "content": USER}, {"role": "assistant", "content": ANSWER}]
MULTI = [*SINGLE, {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes, 100% 🙂."}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
TOOL_CHAT = [
    {"role": "user", "content": "Weather in Rome?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny"},
    {"role": "assistant", "content": "Sunny."},
]
END = {
    "chatml": "<|im_end|>",
    "smollm2": "<|im_end|>",
    "generation": "<|im_end|>",
    "mistral": "</s>",
    "llama3": "<|eot_id|>",
    "deepseek": "<｜end▁of▁sentence｜>",
}
STABLE = list(END)


def spans(tokenizer, sample):
    """Decoded runs of supervised tokens."""
    runs, previous = [], False
    for token, label in zip(sample["input_ids"].tolist(), sample["labels"].tolist(), strict=True):
        supervised = label != -100
        assert not supervised or label == token
        if supervised:
            runs[-1].append(token) if previous else runs.append([token])
        previous = supervised
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("chat", [SINGLE, MULTI], ids=["single", "multi"])
@pytest.mark.parametrize("name", STABLE)
def test_loss_is_on_assistant_turns_with_their_end_of_turn_only(name, chat, tokenizer_for, write_jsonl):
    tokenizer = tokenizer_for(name)
    data = RawConversationDataset(tokenizer, write_jsonl(chat), 512)
    space = " " if name == "mistral" else ""  # Mistral's template prints it, and its header does not
    expected = [space + turn["content"] + END[name] for turn in chat if turn["role"] == "assistant"]
    assert len(data) == 1
    assert spans(tokenizer, data[0]) == expected


@pytest.mark.parametrize("name", STABLE)
def test_ids_are_those_of_apply_chat_template(name, tokenizer_for, write_jsonl):
    tokenizer = tokenizer_for(name)
    data = RawConversationDataset(tokenizer, write_jsonl(MULTI), 512)
    assert data[0]["input_ids"].tolist() == tokenizer.apply_chat_template(MULTI)["input_ids"]


def test_a_template_that_trims_keeps_the_mask_exact(tokenizer_for, write_jsonl):
    tokenizer = tokenizer_for("llama3")
    chat = [{"role": "user", "content": " hi \n"}, {"role": "assistant", "content": "\n hello there \n"}]
    data = RawConversationDataset(tokenizer, write_jsonl(chat), 512)
    assert spans(tokenizer, data[0]) == ["hello there<|eot_id|>"]


def test_the_same_text_in_a_prompt_and_an_answer_is_told_apart(tokenizer_for, write_jsonl):
    tokenizer = tokenizer_for("chatml")
    chat = [{"role": "user", "content": "assistant"}, {"role": "assistant", "content": "assistant"}]
    sample = RawConversationDataset(tokenizer, write_jsonl(chat), 512)[0]
    assert spans(tokenizer, sample) == ["assistant<|im_end|>"]
    before = sample["input_ids"][: int((sample["labels"] != -100).nonzero()[0])].tolist()
    assert tokenizer.decode(before) == "<|im_start|>user\nassistant<|im_end|>\n<|im_start|>assistant\n"


def test_a_token_merged_over_the_start_of_an_answer_is_supervised(tokenizer_for, write_jsonl):
    tokenizer = tokenizer_for("plain")
    chat = [
        {"role": "user", "content": "hello there"},
        {"role": "assistant", "content": "the coati"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "the coati"},
    ]
    data = RawConversationDataset(tokenizer, write_jsonl(chat), 512)
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    assert data[0]["input_ids"].tolist() == tokenizer(text + "</s>")["input_ids"]
    # " the" is one token here: the header's space and the answer's first word.
    assert tokenizer.tokenize(" the") == ["Ġthe"]
    assert spans(tokenizer, data[0]) == [" the coati\n", " the coati\n</s>"]


def test_a_conversation_may_open_with_the_assistant(tokenizer_for, write_jsonl):
    tokenizer = tokenizer_for("chatml")
    chat = [{"role": "assistant", "content": "Hello there"}, *SINGLE]
    data = RawConversationDataset(tokenizer, write_jsonl(chat), 512)
    assert spans(tokenizer, data[0]) == ["Hello there<|im_end|>", ANSWER + "<|im_end|>"]


def test_turns_after_the_last_answer_are_left_out(tokenizer_for, write_jsonl):
    tokenizer = tokenizer_for("chatml")
    data = RawConversationDataset(tokenizer, write_jsonl([*SINGLE, {"role": "user", "content": "Bye"}]), 512)
    assert data[0]["input_ids"].tolist() == tokenizer.apply_chat_template(SINGLE)["input_ids"]


def test_no_system_prompt_is_added_and_a_given_one_is_not_supervised(tokenizer_for, write_jsonl):
    tokenizer = tokenizer_for("chatml")
    data = RawConversationDataset(
        tokenizer, write_jsonl(SINGLE, [{"role": "system", "content": "Be kind."}, *SINGLE]), 512
    )
    assert "system" not in tokenizer.decode(data[0]["input_ids"])
    assert tokenizer.decode(data[1]["input_ids"]).startswith("<|im_start|>system\nBe kind.<|im_end|>\n")
    assert spans(tokenizer, data[1]) == [ANSWER + "<|im_end|>"]
    assert data.notices == []


def test_the_templates_own_system_prompt_is_said(tokenizer_for, write_jsonl):
    data = RawConversationDataset(
        tokenizer_for("smollm2"), write_jsonl(SINGLE, [{"role": "system", "content": "Be kind."}, *SINGLE]), 512
    )
    (notice,) = data.notices
    assert "to the 1 lines without one: 'You are a helpful AI assistant named SmolLM" in notice
    assert notice in data.summary()


def test_a_template_that_rewrites_earlier_turns_gives_one_sample_per_answer(tokenizer_for, write_jsonl):
    tokenizer = tokenizer_for("qwen3")
    chat = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "<think>\nhmm\n</think>\n\n4"},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes"},
    ]
    data = RawConversationDataset(tokenizer, write_jsonl(SINGLE, chat), 512)
    assert (len(data), data.num_lines, data.num_split_lines) == (3, 2, 1)
    assert spans(tokenizer, data[1]) == ["<think>\nhmm\n</think>\n\n4<|im_end|>"]
    assert spans(tokenizer, data[2]) == ["<think>\n\n</think>\n\nYes<|im_end|>"]
    assert "assistant\n4<|im_end|>" in tokenizer.decode(data[2]["input_ids"])
    assert "1 lines split" in data.summary()


def test_tool_calls_and_tools_reach_the_template(tokenizer_for, write_jsonl):
    tokenizer = tokenizer_for("qwen3")
    data = RawConversationDataset(tokenizer, write_jsonl({"messages": TOOL_CHAT, "tools": TOOLS}), 512)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert spans(tokenizer, data[0]) == [f"<think>\n\n</think>\n\n\n{call}<|im_end|>"]
    assert spans(tokenizer, data[1]) == ["<think>\n\n</think>\n\nSunny.<|im_end|>"]
    text = tokenizer.decode(data[1]["input_ids"])
    assert '"parameters": {"type": "object"}' in text
    assert "<|im_start|>tool\nsunny<|im_end|>" in text


def test_tool_calls_that_the_template_does_not_print_are_refused(tokenizer_for, write_jsonl):
    with pytest.raises(ValueError, match=r"chats.jsonl:2: .*does not print the tool_calls of turn 2"):
        RawConversationDataset(tokenizer_for("chatml"), write_jsonl(SINGLE, TOOL_CHAT), 512)


def test_tools_that_the_template_does_not_print_are_refused(tokenizer_for, write_jsonl):
    with pytest.raises(ValueError, match=r":1: the chat template does not print the tool 'weather'"):
        RawConversationDataset(tokenizer_for("chatml"), write_jsonl({"messages": SINGLE, "tools": TOOLS}), 512)


def test_arguments_that_would_be_quoted_twice_are_refused(tokenizer_for, write_jsonl):
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    chat = [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(ValueError, match="give 'arguments' as an object"):
        RawConversationDataset(tokenizer_for("qwen3"), write_jsonl(chat), 512)


def test_a_template_that_wants_arguments_as_text_says_so(templates, tokenizer_for, write_jsonl):
    tokenizer = tokenizer_for("qwen3")
    tokenizer.chat_template = templates["qwen3"].replace(
        "{{ call.function.arguments | tojson }}", "{{ ' ' + call.function.arguments }}"
    )
    with pytest.raises(ValueError, match=r":1: .*it may want the 'arguments' of tool calls as a JSON string"):
        RawConversationDataset(tokenizer, write_jsonl({"messages": TOOL_CHAT, "tools": TOOLS}), 512)


def test_a_null_content_that_the_template_would_print_as_none_becomes_empty(tokenizer_for, write_jsonl):
    tokenizer = tokenizer_for("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{% endfor %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    data = RawConversationDataset(tokenizer, write_jsonl(TOOL_CHAT[:2]), 512)
    assert spans(tokenizer, data[0]) == ["weather<|im_end|>"]


def test_a_system_turn_that_the_template_does_not_print_is_refused(templates, tokenizer_for, write_jsonl):
    tokenizer = tokenizer_for("deepseek")
    tokenizer.chat_template = templates["deepseek"].replace(
        "{% if m['role'] == 'system' %}{{ m['content'] }}{% el", "{% "
    )
    with pytest.raises(ValueError, match=r":1: the chat template does not print all of turn 1 \(system\)"):
        RawConversationDataset(tokenizer, write_jsonl([{"role": "system", "content": "Be kind."}, *SINGLE]), 512)


def test_reasoning_that_the_template_drops_is_refused(tokenizer_for, write_jsonl):
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "<think>\nhmm\n</think>\n\n4"}]
    with pytest.raises(ValueError, match=r":1: the chat template does not print all of the content of turn 2"):
        RawConversationDataset(tokenizer_for("deepseek_r1"), write_jsonl(chat), 512)
    with pytest.raises(ValueError, match="all of the reasoning_content of turn 2"):
        turn = {"role": "assistant", "content": "4", "reasoning_content": "hmm"}
        RawConversationDataset(tokenizer_for("deepseek"), write_jsonl([chat[0], turn]), 512)


def test_a_generation_prompt_that_no_turn_has_is_said(tokenizer_for, write_jsonl):
    tokenizer = tokenizer_for("deepseek_r1")
    chat = [*SINGLE, {"role": "user", "content": "tag?"}, {"role": "assistant", "content": "<b>"}]
    data = RawConversationDataset(tokenizer, write_jsonl(chat), 512)
    # "<b>" begins like "<think>", which the generation prompt has and the turn has not.
    assert spans(tokenizer, data[0]) == [ANSWER + "<｜end▁of▁sentence｜>", "<b><｜end▁of▁sentence｜>"]
    (notice,) = data.notices
    assert "generation prompt ends with '<think>\\n'" in notice


def test_without_an_end_of_turn_token_the_next_special_token_or_eos_is_learnt(tokenizer_for, write_jsonl):
    tokenizer = tokenizer_for("glm")
    data = RawConversationDataset(tokenizer, write_jsonl(MULTI), 512)
    assert spans(tokenizer, data[0]) == [ANSWER + "<|user|>", "Yes, 100% 🙂.<|endoftext|>"]
    assert "'<|endoftext|>' is put, supervised, at the end" in data.summary()


def test_a_generation_block_without_the_end_of_turn_is_obeyed_and_said(templates, tokenizer_for, write_jsonl):
    tokenizer = tokenizer_for("generation")
    tokenizer.chat_template = templates["generation"].replace(
        "m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '", "m['content'] }}{% endgeneration %}{{ '<|im_end|>"
    )
    data = RawConversationDataset(tokenizer, write_jsonl(MULTI), 512)
    assert spans(tokenizer, data[0]) == [ANSWER, "Yes, 100% 🙂."]
    assert "leaves out '<|im_end|>'" in data.summary()


def test_what_the_template_raises_names_the_line(tokenizer_for, write_jsonl):
    with pytest.raises(
        ValueError, match=r"chats.jsonl:2: the chat template refuses the conversation: Conversation roles"
    ):
        RawConversationDataset(tokenizer_for("mistral"), write_jsonl(SINGLE, [*SINGLE, SINGLE[1]]), 512)


def test_template_kwargs_reach_the_template(tokenizer_for, templates, write_jsonl):
    tokenizer = tokenizer_for("chatml")
    tokenizer.chat_template = "{{ mood | default('calm') }}" + templates["chatml"]
    data = RawConversationDataset(tokenizer, write_jsonl(SINGLE), 512, template_kwargs={"mood": "glad"})
    assert tokenizer.decode(data[0]["input_ids"]).startswith("glad<|im_start|>")
    with pytest.raises(ValueError, match="reads no 'moods': leave it out"):
        RawConversationDataset(tokenizer, write_jsonl(SINGLE), 512, template_kwargs={"moods": "glad"})


class CharTokenizer(PreTrainedTokenizer):
    """A tokenizer in Python (Kimi's is one): no offsets. It merges "\\nA", over the end of the header."""

    VOCAB = ("\nA", "\n", *map(chr, range(32, 127)))

    @property
    def vocab_size(self):
        return len(self.VOCAB)

    def get_vocab(self):
        return {token: i for i, token in enumerate(self.VOCAB)} | self.added_tokens_encoder

    def _tokenize(self, text, **kwargs):
        return re.findall(r"\nA|\n|.", text)

    def _convert_token_to_id(self, token):
        return self.VOCAB.index(token)

    def _convert_id_to_token(self, index):
        return self.VOCAB[index]

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)


def test_a_tokenizer_without_offsets_gives_the_same_mask(templates, write_jsonl):
    tokenizer = CharTokenizer(eos_token="<|im_end|>", extra_special_tokens=["<|im_start|>"])
    tokenizer.chat_template = templates["chatml"]
    chat = [*SINGLE, {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
    data = RawConversationDataset(tokenizer, write_jsonl(chat), 512)
    assert not tokenizer.is_fast
    assert data[0]["input_ids"].tolist() == tokenizer.apply_chat_template(chat)["input_ids"]
    assert spans(tokenizer, data[0]) == ["\n" + ANSWER + "<|im_end|>", "Yes.<|im_end|>"]


def test_a_tokenizer_without_offsets_supervises_a_token_merged_over_the_end_of_a_turn(templates, write_jsonl):
    tokenizer = CharTokenizer(eos_token="</s>")
    tokenizer.chat_template = templates["plain"]
    chat = [*SINGLE, {"role": "assistant", "content": "Yes."}]
    data = RawConversationDataset(tokenizer, write_jsonl(chat), 512)
    assert spans(tokenizer, data[0]) == [ANSWER + "\nA", "Yes.\n</s>"]


def test_a_tokenizer_that_drops_white_space_is_refused(tokenizer_for, write_jsonl):
    from tokenizers import pre_tokenizers

    tokenizer = tokenizer_for("chatml")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    with pytest.raises(ValueError, match="drops white space"):
        RawConversationDataset(tokenizer, write_jsonl(SINGLE), 512)


def test_a_tokenizer_without_a_chat_template_is_refused(tokenizer_for, write_jsonl):
    tokenizer = tokenizer_for("chatml")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"has no chat template.*set tokenizer.chat_template"):
        RawConversationDataset(tokenizer, write_jsonl(SINGLE), 512)
