"""RawConversationDataset: counts, truncation, broken lines, what the user is shown."""

import json
from pathlib import Path

import pytest
import torch

from coati_ext.dataset import RawConversationDataset
from coati_ext.dataset.jsonl import iter_conversations

CHAT = [{"role": "user", "content": "What is a coati?"}, {"role": "assistant", "content": "A coati is a mammal."}]
LONG_PROMPT = [{"role": "user", "content": "a coati " * 100}, {"role": "assistant", "content": "Yes."}]


@pytest.fixture
def tokenizer(tokenizer_for):
    return tokenizer_for("chatml")


def test_both_line_forms_blank_lines_and_windows_files(tokenizer, write_jsonl):
    body = json.dumps({"messages": CHAT})
    data = RawConversationDataset(tokenizer, write_jsonl(b"\xef\xbb\xbf" + body.encode(), "", CHAT, body + "\r"), 512)
    assert (len(data), data.num_lines) == (3, 3)
    assert all(torch.equal(data[0]["input_ids"], data[i]["input_ids"]) for i in (1, 2))
    assert data.show_sample(1).startswith("sample 1 (line 3)")


def test_a_line_is_what_an_editor_calls_one(tokenizer, write_jsonl):
    separator = [CHAT[0], {"role": "assistant", "content": "one\u2028two\x85three"}]
    path = write_jsonl(json.dumps(separator, ensure_ascii=False), "[")
    with pytest.raises(ValueError, match=r"chats.jsonl:2: not JSON"):
        RawConversationDataset(tokenizer, path, 512)


def test_samples_are_int64_with_labels_of_the_same_length(tokenizer, write_jsonl):
    sample = RawConversationDataset(tokenizer, write_jsonl(CHAT), 512)[0]
    assert sample.keys() == {"input_ids", "labels"}
    assert all(value.dtype == torch.int64 and value.dim() == 1 for value in sample.values())
    assert sample["input_ids"].shape == sample["labels"].shape


def test_indexing_is_that_of_a_sequence(tokenizer, write_jsonl):
    data = RawConversationDataset(tokenizer, write_jsonl(CHAT, LONG_PROMPT), 512)
    assert torch.equal(data[-1]["input_ids"], data[1]["input_ids"])
    assert torch.equal(data[-2]["input_ids"], data[0]["input_ids"])
    assert len(list(data)) == 2
    with pytest.raises(IndexError, match="sample 2 of 2"):
        data[2]


def test_counts_are_those_of_the_labels(tokenizer, write_jsonl):
    data = RawConversationDataset(tokenizer, write_jsonl(CHAT, LONG_PROMPT), 512)
    assert data.num_tokens == sum(len(sample["input_ids"]) for sample in data)
    # Labels are shifted by one in the loss; the first label is never used and so never set.
    assert data.num_supervised_tokens == sum(int((sample["labels"][1:] != -100).sum()) for sample in data)


def test_the_first_token_is_never_supervised(tokenizer_for, write_jsonl):
    tokenizer = tokenizer_for("plain")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    data = RawConversationDataset(tokenizer, write_jsonl([{"role": "assistant", "content": "A coati is"}]), 512)
    assert data[0]["labels"][0] == -100
    assert data.num_supervised_tokens == data.num_tokens - 1


def test_a_long_sample_is_cut_on_the_right_and_counted(tokenizer, write_jsonl):
    path = write_jsonl(CHAT)
    whole = RawConversationDataset(tokenizer, path, 512)
    cut = RawConversationDataset(tokenizer, path, whole.num_tokens - 4)
    assert (cut.num_truncated, cut.num_dropped, whole.num_truncated) == (1, 0, 0)
    assert torch.equal(cut[0]["input_ids"], whole[0]["input_ids"][:-4])
    assert torch.equal(cut[0]["labels"], whole[0]["labels"][:-4])
    assert f"1 cut to {whole.num_tokens - 4} tokens" in cut.summary()


def test_no_sample_is_without_supervised_tokens_whatever_max_length_is(tokenizer, write_jsonl):
    path = write_jsonl(CHAT, LONG_PROMPT, CHAT * 3)
    num_kept = set()
    for max_length in range(2, 80):
        try:
            data = RawConversationDataset(tokenizer, path, max_length)
        except ValueError as error:
            assert "no usable sample" in str(error)
            continue
        assert all((sample["labels"] != -100).any() and len(sample["labels"]) <= max_length for sample in data)
        assert len(data) + data.num_dropped == 3
        num_kept.add(len(data))
    assert num_kept == {2}


def test_a_dropped_sample_is_counted_and_named(tokenizer, write_jsonl):
    data = RawConversationDataset(tokenizer, write_jsonl(CHAT, LONG_PROMPT), 100)
    assert (len(data), data.num_dropped, data.num_truncated) == (1, 1, 0)
    assert "1 dropped, no assistant token within 100 tokens (first: line 2," in data.summary()


def test_a_file_of_which_nothing_is_left_is_refused(tokenizer, write_jsonl):
    with pytest.raises(
        ValueError, match=r"chats.jsonl: no usable sample. 1 lines -> 0 samples, 1 dropped.*Raise max_len"
    ):
        RawConversationDataset(tokenizer, write_jsonl(LONG_PROMPT), 20)


@pytest.mark.parametrize("lines", [[], ["", "  "]], ids=["no bytes", "blank lines"])
def test_an_empty_file_is_refused(lines, tokenizer, write_jsonl):
    with pytest.raises(ValueError, match=r"chats.jsonl: the file is empty; expected one conversation a line"):
        RawConversationDataset(tokenizer, write_jsonl(*lines), 512)


def test_max_length_below_two_is_refused(tokenizer, write_jsonl):
    with pytest.raises(ValueError, match="max_length is 1; expected at least 2"):
        RawConversationDataset(tokenizer, write_jsonl(CHAT), 1)


def turn(**kwargs):
    return [kwargs, CHAT[1]]


BROKEN = {
    "json": ('[{"role": "user"', r"not JSON \(.*column 17\); expected a list of"),
    "json over lines": ("[", "this looks like JSON spread over several lines"),
    "utf-8": (b'[{"role": "user", "content": "\xff"}]', r"not UTF-8 \(byte 31 of the line\)"),
    "number": ("5", r"the line is 5; expected a list of"),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "hi"}]},
        r"has no 'messages' \(its keys: 'conversations'\)",
    ),
    "messages": ({"messages": "hi"}, "'messages' is \"hi\"; expected a list of turns"),
    "tools": ({"messages": CHAT, "tools": "weather"}, "'tools' is \"weather\"; expected a list of JSON-schema"),
    "no turns": ([], "the conversation has no turns"),
    "turn": (["hi"], 'turn 1 is "hi"; expected an object with "role" and "content"'),
    "no role": ([CHAT[0], {"content": "hi"}], r"turn 2 has no 'role' \(its keys: 'content'\); expected one of system"),
    "role": (turn(role="human", content="hi"), 'turn 1 has role "human"; expected one of system, developer, user'),
    "role type": (turn(role=["user"], content="hi"), r'turn 1 has role \["user"\]'),
    "no content": (turn(role="user"), r"turn 1 \(user\) has no 'content'; expected a string"),
    "content": (turn(role="user", content=3), r"turn 1 \(user\) has content 3; expected a string"),
    "null": (turn(role="user", content=None), r"turn 1 \(user\) has content null"),
    "image": (turn(role="user", content=[{"type": "image", "url": "x"}]), r"turn 1 \(user\) has the .*part"),
    "surrogate": ('[{"role": "user", "content": "\\ud83d"}]', r"turn 1 \(user\) holds half of a"),
    "empty answer": ([CHAT[0], {"role": "assistant", "content": " "}], r"turn 2 \(assistant\) is empty"),
    "no answer": ([CHAT[0]], "no assistant turn, so there is nothing to train on"),
    "call": ([CHAT[0], {"role": "assistant", "tool_calls": ["f()"]}], r'turn 2 has the tool call "f\(\)"; expected'),
    "user call": (turn(role="user", tool_calls=[{"name": "f"}]), r"turn 1 \(user\) has tool_calls; only assistant"),
    "deep": ("[" * 100000, "JSON nested too deeply|not JSON"),
}


@pytest.mark.parametrize(("line", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_line_is_named_with_what_was_expected(line, message, tokenizer, write_jsonl):
    path = write_jsonl(CHAT, "", line, CHAT)
    with pytest.raises(ValueError, match=message) as error:
        RawConversationDataset(tokenizer, path, 512)
    assert str(error.value).startswith(f"{path}:3: ")


def test_skip_bad_lines_counts_them_once_and_goes_on(tokenizer, write_jsonl):
    path = write_jsonl(CHAT, *(line for line, _ in BROKEN.values()), CHAT)
    data = RawConversationDataset(tokenizer, path, 512, skip_bad_lines=True)
    assert (len(data), data.num_bad_lines, data.num_lines) == (2, len(BROKEN), len(BROKEN) + 2)
    assert f"{len(BROKEN)} bad lines skipped (first: {path}:2: not JSON" in data.summary()


def test_skip_bad_lines_counts_what_the_template_refuses(tokenizer_for, write_jsonl):
    data = RawConversationDataset(
        tokenizer_for("mistral"), write_jsonl(CHAT, [*CHAT, CHAT[1]]), 512, skip_bad_lines=True
    )
    assert (len(data), data.num_bad_lines, data.num_lines) == (1, 1, 2)


def test_a_file_of_bad_lines_only_is_refused_with_the_first(tokenizer, write_jsonl):
    with pytest.raises(
        ValueError, match=r"no usable sample. 2 lines -> 0 samples, 2 bad lines skipped \(first: .*:1: "
    ):
        RawConversationDataset(tokenizer, write_jsonl("[", "5"), 512, skip_bad_lines=True)


def test_the_last_line_is_checked_before_the_first_is_tokenised(tokenizer, write_jsonl, monkeypatch):
    calls = []
    monkeypatch.setattr("coati_ext.dataset.chat_template.tokenize_chats", lambda *args: calls.append(args) or [])
    with pytest.raises(ValueError, match=r":600: the line is 5"):
        RawConversationDataset(tokenizer, write_jsonl(*[CHAT] * 599, "5"), 512)
    assert not calls


def test_text_parts_are_joined(tokenizer, write_jsonl):
    parts = [
        CHAT[0],
        {"role": "assistant", "content": [{"type": "text", "text": t} for t in ("A coati is", " a mammal.")]},
    ]
    data = RawConversationDataset(tokenizer, write_jsonl(CHAT, parts), 512)
    assert torch.equal(data[0]["input_ids"], data[1]["input_ids"])


def test_more_samples_than_one_tokenizer_call_keep_their_order(tokenizer, write_jsonl):
    chats = [[{"role": "user", "content": str(i)}, CHAT[1]] for i in range(600)]
    data = RawConversationDataset(tokenizer, write_jsonl(*chats), 512)
    assert [tokenizer.decode(sample["input_ids"]).split("\n")[1] for sample in data] == [
        f"{i}<|im_end|>" for i in range(600)
    ]


def test_show_sample_marks_what_is_trained(tokenizer, write_jsonl):
    data = RawConversationDataset(tokenizer, write_jsonl(CHAT), 512)
    header, _, text = data.show_sample(color=False).partition("\n")
    supervised = data.num_supervised_tokens
    assert header == f"sample 0 (line 1): {data.num_tokens} tokens, {supervised} supervised, marked {{+like this+}}"
    assert text == (
        "<|im_start|>user\nWhat is a coati?<|im_end|>\n<|im_start|>assistant\n{+A coati is a mammal.<|im_end|>+}\n"
    )
    assert "\x1b[32mA coati is a mammal.<|im_end|>\x1b[0m" in data.show_sample(color=True)


def test_summary_is_one_line_with_the_counts(tokenizer, write_jsonl):
    path = write_jsonl(CHAT)
    data = RawConversationDataset(tokenizer, path, 512)
    share = round(100 * data.num_supervised_tokens / data.num_tokens)
    assert data.summary() == (
        f"{path}: 1 lines -> 1 samples; {data.num_tokens} tokens, {data.num_supervised_tokens} supervised ({share}%)"
    )


def test_the_recipes_data_set_is_whole():
    file = Path(__file__).parents[2] / "recipes" / "data" / "coati_support.jsonl"
    chats = list(iter_conversations(file))
    assert f"{len(chats)} short conversations" in (file.parent / "README.md").read_text(encoding="utf-8")
    assert {line[0] for line in file.read_text(encoding="utf-8").splitlines()} == {"[", "{"}
    answers = {
        answer["content"]
        for chat in chats
        for question, answer in zip(chat.messages, chat.messages[1:], strict=False)
        if question == {"role": "user", "content": "What is coati_ext?"}
    }
    assert answers == {
        "coati_ext is a thin extension to ColossalAI's Booster for fine-tuning mixture-of-experts language models "
        "with LoRA and GRPO."
    }


def test_prompts_without_an_answer_can_be_read(write_jsonl):
    (conversation,) = iter_conversations(write_jsonl([CHAT[0]]), require_assistant=False)
    assert (conversation.messages, conversation.tools, conversation.line) == ([CHAT[0]], None, 1)
