import time

import pytest

from coati_ext.models.reward_score import find_reward
from coati_ext.models.reward_score.answer import check_tags, find_answer, strip_end_of_turn
from coati_ext.models.reward_score.code import last_block

TAGS = {
    "answer_start": {"text": "<answer>", "num_occur": 1},
    "answer_end": {"text": "</answer>", "num_occur": 1},
}
HOSTILE = {
    "digits": "1" * 100_000,
    "commas": "1," * 50_000,
    "groups": "1,111" * 20_000,
    "fractions": "1/" * 50_000,
    "mixed": "1 1/2" * 20_000,
    "braces": "{" * 100_000,
    "boxes": "\\boxed{" * 14_000,
    "closed boxes": "\\boxed{" * 9_000 + "}" * 9_000,
    "hashes": "####" * 25_000,
    "hash lines": "#### 1\n" * 14_000,
    "blanks": " " * 100_000,
    "tags": "<answer>" * 12_000,
    "end of turn": "</s>" * 25_000,
    "phrases": "answer " * 14_000,
    "answers": "answer is answer is " * 5_000,
    "fences": "```\n" * 25_000,
    "backslashes": "\\" * 100_000,
    "think": "<think>" * 14_000,
    "signs": "-" * 100_000,
    "answer blanks": "answer" + " " * 100_000,
}


@pytest.mark.parametrize("reward", ["number", "multiple_choice", "exact_match", "code"])
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_100_000_characters_take_no_time(reward, text):
    gold = {"number": "42", "multiple_choice": "B", "exact_match": "x", "code": ["assert f(1) == 1"]}[reward]
    forms = [{"tags": TAGS}, {}] if reward == "code" else [{"tags": TAGS}, {}, {"extraction": "flexible"}]
    for settings in forms:
        for completion in (text, f"#### {text}", f"<answer>{text}</answer>"):
            began = time.process_time()
            assert find_reward(reward)(completion, gold, **settings).reason != "correct"
            assert time.process_time() - began < 1.0


@pytest.mark.parametrize(
    "change, message",
    [
        ({"answer_start": {"text": "<answer>"}}, "'answer_start' is"),
        ({"answer_start": "<answer>"}, "'answer_start' is '<answer>'"),
        ({"answer_start": {"text": " ", "num_occur": 1}}, "text of 'answer_start'"),
        ({"answer_start": {"text": "<answer>", "num_occur": True}}, "num_occur of 'answer_start' is True"),
        ({"answer_start": {"text": "<answer>", "num_occur": 2}}, "with num_occur 1"),
        ({"think": {"text": "answer", "num_occur": 1}}, "'think' occurs in that of"),
        ({"think": {"text": "<answer>", "num_occur": 1}}, "occurs in that of"),
    ],
)
def test_tags_that_cannot_be_used_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        check_tags({**TAGS, **change})


def test_tags_without_an_answer_or_in_the_wrong_order_are_refused():
    with pytest.raises(ValueError, match="'answer_end' must be there"):
        check_tags({"answer_start": TAGS["answer_start"]})
    with pytest.raises(ValueError, match="must come before"):
        check_tags(dict(reversed(TAGS.items())))


def test_an_unknown_extraction_is_refused():
    with pytest.raises(ValueError, match="extraction is 'loose'; expected 'strict' or 'flexible'"):
        find_answer("#### 1", extraction="loose")


def test_only_end_of_turn_tokens_are_taken_from_the_end():
    assert strip_end_of_turn("a\n<|im_end|>\n") == "a\n"
    assert strip_end_of_turn("a</s> <eos>") == "a"
    assert strip_end_of_turn("a\n") == "a\n"
    assert strip_end_of_turn("</s> a") == "</s> a"


def test_the_last_closed_python_block_is_the_program():
    assert last_block("```py\na\n```\n```\nb\n```\n") == ("b\n", None)
    assert last_block("```python\na\n```\n```text\nout\n```") == ("a\n", None)
    assert last_block("```python\na\n```\n```python\nb") == ("", "truncated")
    assert last_block("a ```python b```") == ("", "no_answer")
