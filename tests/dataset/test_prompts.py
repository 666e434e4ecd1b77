"""RawPromptDataset: ids of the generation prompt, golds, what is dropped and refused, what the user is shown."""

import json

import pytest

from coati_ext.dataset import RawPromptDataset
from coati_ext.dataset.conversation_template import ConversationTemplate
from coati_ext.dataset.jsonl import iter_prompts

USER = {"role": "user", "content": "What is a coati?"}
SYSTEM = {"role": "system", "content": "A coati climbs trees."}
PROMPT = {"messages": [USER], "gt_answer": "mammal"}
LONG = {"messages": [{"role": "user", "content": "a coati " * 100}], "gt_answer": "long"}
TURNS = [USER, {"role": "assistant", "content": "A mammal."}, {"role": "user", "content": "And a raccoon?"}]


@pytest.fixture
def tokenizer(tokenizer_for):
    return tokenizer_for("chatml")


@pytest.mark.parametrize(
    "name", ["chatml", "smollm2", "mistral", "llama3", "deepseek", "deepseek_r1", "qwen3", "plain"]
)
@pytest.mark.parametrize("messages", [[USER], TURNS], ids=["one turn", "three turns"])
def test_ids_are_those_of_the_chat_template_with_its_generation_prompt(name, messages, tokenizer_for, write_jsonl):
    tokenizer = tokenizer_for(name)
    (item,) = RawPromptDataset(tokenizer, write_jsonl({"messages": messages, "gt_answer": 4}), 512)
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert item["input_ids"] == expected["input_ids"]
    assert item["text"] == tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def test_an_item_has_the_gold_the_line_and_the_other_keys(tokenizer, write_jsonl):
    path = write_jsonl("", {**PROMPT, "gt_answer": [1, 2], "reward": "number", "id": 7}, PROMPT)
    data = RawPromptDataset(tokenizer, path, 512)
    assert data[0].keys() == {"input_ids", "text", "gt_answer", "metadata", "source"}
    assert (data[0]["gt_answer"], data[0]["metadata"], data[0]["source"]) == (
        [1, 2],
        {"reward": "number", "id": 7},
        f"{path}:2",
    )
    assert (data[-1]["gt_answer"], data[-1]["metadata"], data[-1]["source"]) == ("mammal", {}, f"{path}:3")
    assert all(type(token) is int for token in data[0]["input_ids"])
    with pytest.raises(IndexError, match="prompt 2 of 2"):
        data[2]


def test_too_long_prompts_are_dropped_whole_and_counted(tokenizer, write_jsonl):
    path = write_jsonl(LONG, PROMPT, LONG)
    data = RawPromptDataset(tokenizer, path, 30)
    assert (len(data), data.num_dropped, data.num_lines, data[0]["source"]) == (1, 2, 3, f"{path}:2")
    assert "2 dropped, longer than 30 tokens (first: line 1, " in data.summary()
    exact = RawPromptDataset(tokenizer, write_jsonl(PROMPT), data.num_tokens)
    assert exact[0] == {**data[0], "source": f"{exact.input_file}:1"}
    with pytest.raises(ValueError, match=r"no usable prompt. 1 lines -> 0 prompts, 1 dropped.*Raise max_length"):
        RawPromptDataset(tokenizer, write_jsonl(PROMPT), data.num_tokens - 1)


BROKEN = {
    "list": ([USER], 'the line is .*; expected an object with "messages" and "gt_answer"'),
    "no messages": ({"question": "q", "gt_answer": 1}, r"has no 'messages' \(its keys: 'question', 'gt_answer'\)"),
    "no gold": ({"messages": [USER], "answer": "4"}, r"has no 'gt_answer' \(its keys: 'messages', 'answer'\)"),
    "null gold": ({"messages": [USER], "gt_answer": None}, "'gt_answer' is null; expected the right answer"),
    "blank gold": ({"messages": [USER], "gt_answer": " "}, "'gt_answer' is \" \""),
    "nan gold": ('{"messages": [{"role": "user", "content": "q"}], "gt_answer": NaN}', "'gt_answer' is NaN"),
    "answered": (
        {"messages": TURNS[:2], "gt_answer": 1},
        "turn 2, the last, is of role 'assistant'.*take the turn out",
    ),
    "system only": ({"messages": [SYSTEM], "gt_answer": 1}, "turn 1, the last, is of role 'system'; expected 'user'"),
    "empty question": ({"messages": [{"role": "user", "content": " "}], "gt_answer": 1}, r"turn 1 \(user\) is empty"),
    "role": ({"messages": [{"role": "human", "content": "q"}], "gt_answer": 1}, 'turn 1 has role "human"'),
    "json": ("{", "not JSON .*several lines"),
}


@pytest.mark.parametrize(("line", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_line_is_named_with_what_was_expected(line, message, tokenizer, write_jsonl):
    path = write_jsonl(PROMPT, "", line, PROMPT)
    with pytest.raises(ValueError, match=message) as error:
        RawPromptDataset(tokenizer, path, 512)
    assert str(error.value).startswith(f"{path}:3: ")


def test_skip_bad_lines_counts_them_once_and_goes_on(tokenizer, write_jsonl):
    path = write_jsonl(PROMPT, *(line for line, _ in BROKEN.values()), PROMPT)
    data = RawPromptDataset(tokenizer, path, 512, skip_bad_lines=True)
    assert (len(data), data.num_bad_lines, data.num_lines) == (2, len(BROKEN), len(BROKEN) + 2)
    assert f"{len(BROKEN)} bad lines skipped (first: {path}:2: the line is" in data.summary()


def test_what_the_template_refuses_is_a_broken_line(tokenizer_for, write_jsonl):
    path = write_jsonl(PROMPT, {"messages": [USER, USER], "gt_answer": 1})
    with pytest.raises(ValueError, match=r"chats.jsonl:2: the chat template refuses.*must alternate"):
        RawPromptDataset(tokenizer_for("mistral"), path, 512)


def test_a_turn_that_the_template_does_not_print_is_a_broken_line(tokenizer, write_jsonl):
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if add_generation_prompt %}>{% endif %}"
    with pytest.raises(ValueError, match=r":1: the chat template does not print all of turn 3 \(user\)"):
        RawPromptDataset(tokenizer, write_jsonl({"messages": TURNS, "gt_answer": 1}), 512)


def test_golds_may_be_left_out_if_no_reward_wants_them(tokenizer, write_jsonl):
    (item,) = RawPromptDataset(tokenizer, write_jsonl({"messages": [USER]}), 512, require_gold=False)
    assert item["gt_answer"] is None


def template(**kwargs):
    return ConversationTemplate(**{"stop_ids": [1], "end_of_assistant": "<|im_end|>", **kwargs})


def test_a_template_gives_its_system_message_where_the_line_has_none(tokenizer, write_jsonl):
    path = write_jsonl(PROMPT, {"messages": [{"role": "system", "content": "hello"}, USER], "gt_answer": 1})
    data = RawPromptDataset(tokenizer, path, 512, template=template(system_message=SYSTEM["content"]))
    expected = tokenizer.apply_chat_template([SYSTEM, USER], add_generation_prompt=True, return_dict=True)
    assert data[0]["input_ids"] == expected["input_ids"]
    assert SYSTEM["content"] not in data[1]["text"] and "hello" in data[1]["text"]
    assert data.notices == [
        "1 prompts keep a system turn of their own: the template's system_message is not put before them"
    ]


def test_a_templates_chat_template_comes_before_the_tokenizers_and_may_stand_alone(tokenizer, write_jsonl):
    own = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}{% if add_generation_prompt %}answer: {% endif %}"
    path = write_jsonl(PROMPT)
    for chat_template in (tokenizer.chat_template, None):
        tokenizer.chat_template = chat_template
        (item,) = RawPromptDataset(tokenizer, path, 512, template=template(chat_template=own))
        assert item["text"] == "[What is a coati?]answer: "
    with pytest.raises(ValueError, match="has no chat template"):
        RawPromptDataset(tokenizer, path, 512, template=template())


def add_bos_to_plain_text(tokenizer):
    from tokenizers.processors import TemplateProcessing

    bos = (tokenizer.bos_token, tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[bos])
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    return tokenizer


def test_there_is_one_bos_if_template_and_tokenizer_both_add_one(tokenizer_for, write_jsonl):
    tokenizer = add_bos_to_plain_text(tokenizer_for("mistral"))
    data = RawPromptDataset(tokenizer, write_jsonl(PROMPT), 512)
    assert data[0]["input_ids"].count(tokenizer.bos_token_id) == 1 and not data.notices


def test_there_is_one_bos_if_the_first_turn_holds_it_too(tokenizer_for, write_jsonl):
    tokenizer = tokenizer_for("mistral")
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    path = write_jsonl({"messages": [{"role": "user", "content": "<s><s>hi"}], "gt_answer": 1})
    data = RawPromptDataset(tokenizer, path, 512)
    assert data[0]["input_ids"].count(tokenizer.bos_token_id) == 1
    assert data[0]["text"] == "<s>hi"
    assert data.notices == ["1 prompts began with '<s>' twice; one is taken out"]


def test_a_bos_that_only_the_tokenizer_adds_is_left_out_and_said(tokenizer_for, write_jsonl):
    tokenizer = add_bos_to_plain_text(tokenizer_for("plain"))
    data = RawPromptDataset(tokenizer, write_jsonl(PROMPT), 512)
    assert tokenizer.bos_token_id not in data[0]["input_ids"]
    assert "the chat template does not: prompts begin without it" in data.notices[0]


def test_the_fingerprint_is_of_tokens_golds_and_metadata(tokenizer, write_jsonl):
    variants = [
        [PROMPT, LONG],
        [LONG, PROMPT],
        [PROMPT],
        [{**PROMPT, "gt_answer": "bird"}, LONG],
        [{**PROMPT, "id": 1}, LONG],
        [{**PROMPT, "messages": TURNS}, LONG],
    ]
    prints = [RawPromptDataset(tokenizer, write_jsonl(*lines), 512).fingerprint() for lines in variants]
    assert len(set(prints)) == len(variants)
    spaced = json.dumps(PROMPT, indent=None, separators=(" ,  ", " : "))
    assert RawPromptDataset(tokenizer, write_jsonl("", spaced, LONG), 512).fingerprint() == prints[0]


def test_the_fingerprint_tells_where_one_prompt_ends(tokenizer, write_jsonl):
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    data = []
    for contents in (("#%", "&"), ("#", "%&")):
        lines = [{"messages": [{"role": "user", "content": content}], "gt_answer": 1} for content in contents]
        data.append(RawPromptDataset(tokenizer, write_jsonl(*lines), 512))
    ids = [[token for item in part for token in item["input_ids"]] for part in data]
    assert ids[0] == ids[1]
    assert data[0].fingerprint() != data[1].fingerprint()


def test_summary_and_sample_say_what_the_model_meets(tokenizer_for, write_jsonl):
    tokenizer = tokenizer_for("smollm2")
    path = write_jsonl(PROMPT, LONG)
    data = RawPromptDataset(tokenizer, path, 512)
    longest = len(data[1]["input_ids"])
    assert data.max_prompt_length == longest
    assert data.summary() == (
        f"{path}: 2 lines -> 2 prompts; {data.num_tokens} tokens, {data.num_tokens / 2:.0f} a prompt, {longest} at "
        "most; "
        "note: the chat template adds its own system prompt to the 2 lines without one: "
        "'You are a helpful AI assistant named SmolLM, trained by Hugging Face'"
    )
    header, _, text = data.show_sample().partition("\n")
    assert header == f'prompt 0 ({data.input_file}:1): {len(data[0]["input_ids"])} tokens, gt_answer "mammal"'
    assert text == data[0]["text"] and text.endswith("<|im_start|>assistant\n")


def test_tools_reach_the_template(tokenizer_for, write_jsonl):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    path = write_jsonl({**PROMPT, "tools": tools})
    (item,) = RawPromptDataset(tokenizer_for("qwen3"), path, 512)
    assert '"weather"' in item["text"] and item["metadata"] == {}
    with pytest.raises(ValueError, match=":1: the chat template does not print the tool 'weather'"):
        RawPromptDataset(tokenizer_for("chatml"), path, 512)


def test_iter_prompts_yields_checked_lines(write_jsonl):
    (prompt,) = iter_prompts(write_jsonl({**PROMPT, "id": 3}))
    assert (prompt.messages, prompt.tools, prompt.gt_answer, prompt.metadata, prompt.line) == (
        [USER], None, "mammal", {"id": 3}, 1
    )  # fmt: skip
