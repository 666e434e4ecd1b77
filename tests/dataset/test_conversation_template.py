"""Conversation templates: the files that are read, the ones that are refused, and what a model brings itself."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from coati_ext.dataset import RawPromptDataset
from coati_ext.dataset.conversation_template import ConversationTemplate, read_conversation_template, template_of

RECIPE = Path(__file__).parents[2] / "recipes" / "conversation_templates" / "qwen2.5_3b_math.json"
TAGS = {"think_start": {"text": "<think>", "num_occur": 1}}
GOOD = {
    "chat_template": "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}",
    "system_message": "hello",
    "stop_ids": [1, 0],
    "end_of_assistant": "<|im_end|>",
    "response_format_tags": TAGS,
}


@pytest.fixture
def tokenizer(tokenizer_for):
    return tokenizer_for("chatml")


@pytest.fixture
def write(tmp_path):
    def write(**changes):
        path = tmp_path / "template.json"
        path.write_text(json.dumps({key: value for key, value in {**GOOD, **changes}.items() if value != "absent"}))
        return path

    return write


def test_a_file_is_read_as_it_is_written(tokenizer, write):
    template = read_conversation_template(write(), tokenizer)
    assert template == ConversationTemplate(**{**GOOD, "stop_ids": (1, 0)})


def test_null_and_absent_are_none(tokenizer, write):
    for value in (None, "absent"):
        path = write(chat_template=value, system_message=value, response_format_tags=value)
        template = read_conversation_template(path, tokenizer)
        assert (template.chat_template, template.system_message, template.response_format_tags) == (None, None, {})


BROKEN = {
    "unknown key": ({"stop_id": [1]}, "unknown key 'stop_id'; did you mean 'stop_ids'"),
    "far key": ({"zzz": 1}, "unknown key 'zzz'; known are stop_ids, end_of_assistant, chat_template"),
    "no stop ids": ({"stop_ids": "absent"}, "no 'stop_ids'; it is required"),
    "empty stop ids": ({"stop_ids": []}, r"'stop_ids' is \[\]; expected a list of one or more"),
    "text stop ids": ({"stop_ids": ["<|im_end|>"]}, r"'stop_ids' is \['<\|im_end\|>'\]"),
    "true stop id": ({"stop_ids": [True]}, r"'stop_ids' is \[True\]"),
    "stop id outside": ({"stop_ids": [1, 151645]}, "'stop_ids' has 151645, but the tokenizer .* has tokens 0 to"),
    "negative stop id": ({"stop_ids": [1, -1]}, "'stop_ids' has -1"),
    "end unknown": (
        {"end_of_assistant": "<|end|>"},
        r"'end_of_assistant' is '<\|end\|>', which neither is nor ends in",
    ),
    "end blank": ({"end_of_assistant": " "}, "'end_of_assistant' is ' '"),
    "end does not stop": ({"stop_ids": [0]}, r"ends in token 1, which is not in 'stop_ids' \[0\].*add 1"),
    "tags list": ({"response_format_tags": ["<think>"]}, r"'response_format_tags' is \['<think>'\]"),
    "tag text": ({"response_format_tags": {"a": {"text": "", "num_occur": 1}}}, "'a' has the text ''; expected some"),
    "tag count": ({"response_format_tags": {"a": {"text": "x", "num_occur": 0}}}, "'a' has num_occur 0"),
    "tag keys": ({"response_format_tags": {"a": {"text": "x"}}}, "'a' is {'text': 'x'}; expected"),
    "system": ({"system_message": 3}, "'system_message' is 3; expected text, or null"),
    "jinja": ({"chat_template": "{% for m in"}, "the chat template refuses the conversation"),
    "no system": (
        {"chat_template": "{{ messages[-1]['content'] }}"},
        r"the chat template does not print all of turn 1 \(system\)",
    ),
}


@pytest.mark.parametrize(("changes", "message"), BROKEN.values(), ids=BROKEN)
def test_what_does_not_fit_is_named_with_the_file(changes, message, tokenizer, write):
    path = write(**changes)
    with pytest.raises(ValueError, match=message) as error:
        read_conversation_template(path, tokenizer)
    assert str(error.value).startswith(f"{path}: ")


@pytest.mark.parametrize("text", ["[1]", "{", "\udcff"], ids=["list", "json", "bytes"])
def test_a_file_that_is_no_json_object_is_named(text, tokenizer, tmp_path):
    path = tmp_path / "template.json"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(ValueError, match=r"template.json: (expected an object with the keys|not JSON)"):
        read_conversation_template(path, tokenizer)


def test_an_end_of_assistant_may_have_text_before_its_token(tokenizer, write):
    assert read_conversation_template(write(end_of_assistant="done<|im_end|>\n"), tokenizer)


def test_a_model_stops_at_its_end_of_turn_and_at_its_eos_tokens(tokenizer_for):
    tokenizer = tokenizer_for("llama3")
    eot = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    template = template_of(tokenizer, GenerationConfig(eos_token_id=[7, eot]))
    assert (template.stop_ids, template.end_of_assistant) == ((eot, 7), "<|eot_id|>")
    assert template.chat_template is None and not template.response_format_tags
    assert template_of(tokenizer, GenerationConfig(eos_token_id=9)).stop_ids == (eot, 9)
    assert template_of(tokenizer).stop_ids == (eot,)


def test_the_end_of_turn_need_not_be_the_tokenizers_eos(tokenizer):
    # Qwen2.5's base models: eos is <|endoftext|>, and turns end with <|im_end|>.
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})
    template = template_of(tokenizer, GenerationConfig(eos_token_id=tokenizer.eos_token_id))
    assert template.stop_ids == (1, tokenizer.eos_token_id)
    assert template.end_of_assistant == "<|im_end|>"


def test_a_template_without_end_of_turn_stops_at_eos(tokenizer_for):
    tokenizer = tokenizer_for("plain")
    assert template_of(tokenizer).stop_ids == (tokenizer.eos_token_id,)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="completions would never stop; give a conversation template"):
        template_of(tokenizer)


def test_an_eos_of_another_model_is_refused(tokenizer):
    with pytest.raises(ValueError, match="'stop_ids' has 128009, but the tokenizer"):
        template_of(tokenizer, GenerationConfig(eos_token_id=128009))


def qwen_like() -> PreTrainedTokenizerFast:
    """Bytes, filler, and Qwen's special tokens with Qwen's ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, *(f"filler{i}" for i in range(151643 - len(alphabet)))])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=special[0], extra_special_tokens=special[1:], pad_token=special[0]
    )


def test_the_recipe_for_qwen_fits_its_tokenizer(write_jsonl):  # the other one is the quickstart's, which CI runs
    tokenizer = qwen_like()
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == 151645
    template = read_conversation_template(RECIPE, tokenizer)
    assert template.stop_ids == (151645, 151643)
    texts = [tag["text"] for tag in template.response_format_tags.values()]
    assert texts == ["<think>", "</think>", "<answer>", "</answer>"]
    assert all(text in template.system_message for text in texts)  # nothing is asked of the model that it is not told
    path = write_jsonl({"messages": [{"role": "user", "content": "What is 2 + 2?"}], "gt_answer": "4"})
    (item,) = RawPromptDataset(tokenizer, path, 2000, template=template)
    assert item["text"] == (
        f"<|im_start|>system\n{template.system_message}<|im_end|>\n"
        "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert item["input_ids"].count(151644) == 3
