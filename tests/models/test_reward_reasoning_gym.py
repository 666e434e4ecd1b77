"""The scorers of reasoning-gym's tasks, in processes with a deadline."""

import json

import pytest

from coati_ext.models.reward_score import find_reward

reward = find_reward("reasoning_gym")


def sample_of(task):
    gym = pytest.importorskip("reasoning_gym", exc_type=ImportError)
    entry = gym.create_dataset(task, seed=3, size=1)[0]
    return entry["answer"], {"task": task, "metadata": json.loads(json.dumps(entry["metadata"], default=str))}


@pytest.mark.parametrize("task", ["chain_sum", "gcd", "countdown"])
def test_the_gold_is_paid_in_full_and_another_answer_is_not(task):
    gold, metadata = sample_of(task)
    right = reward(f"#### {gold}", gold, metadata=metadata)
    assert (right.score, right.accuracy, right.reason) == (10.0, 1.0, "correct")
    wrong = reward("#### 123456789", gold, metadata=metadata)
    assert wrong.accuracy == 0.0 and 1.0 <= wrong.score < 10.0 and wrong.reason == "wrong"
    assert reward("no answer", gold, metadata=metadata).reason == "no_answer"


def test_a_scorer_that_refuses_its_own_gold_gives_no_score():
    gold, metadata = sample_of("countdown")
    assert reward("#### 1", gold, metadata={**metadata, "metadata": {}}).score is None


def test_prompts_of_no_task_are_refused():
    with pytest.raises(ValueError, match=r"needs prompts that prepare_dataset\.py made of a task"):
        reward("#### 1", "1", metadata={})


def test_an_unknown_task_is_an_error_and_no_reward_of_0():
    pytest.importorskip("reasoning_gym", exc_type=ImportError)
    with pytest.raises(RuntimeError, match="no_such_task"):
        reward("#### 1", "1", metadata={"task": "no_such_task", "metadata": {}})


def test_the_whole_line_of_an_answer_with_sentences_counts():
    class Pool:
        def run(self, request, deadline_s):
            return float(request["answer"] == "Dogs bark. Cats do not.")

    prompt = {"task": "any", "metadata": {}}
    right = reward("#### Dogs bark. Cats do not.", "", metadata=prompt, pool=Pool())
    wrong = reward("#### Dogs bark. Cats do.", "", metadata=prompt, pool=Pool())
    assert (right.reason, wrong.reason) == ("correct", "wrong")
