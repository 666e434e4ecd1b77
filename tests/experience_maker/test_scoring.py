"""What completions are paid by several models together."""

import pytest

from coati_ext.experience_maker.scoring import score_completions
from coati_ext.models.reward import RewardModel, RLVRRewardModel

PROMPTS = [{"text": "1 + 1?", "gt_answer": "2", "metadata": {"level": 3}, "source": "p.jsonl:1"}] * 3
ANSWERS = ["#### 2", "#### 3", "two"]


class Constant(RewardModel):
    """A reward model without weights: pays the length of prompt and completion."""

    def __init__(self):
        pass

    def __call__(self, prompts, completions):
        return [float(len(prompt) + len(answer)) for prompt, answer in zip(prompts, completions, strict=True)]


def level_of(completion, gold, *, metadata):
    return metadata["level"]


def score(model, answers=ANSWERS):
    return score_completions(model, PROMPTS[: len(answers)], answers, [False] * len(answers), [4] * len(answers))


def test_verifiable_rewards_see_gold_and_metadata():
    scores = score(RLVRRewardModel(["number", level_of]))
    assert [one.score for one in scores] == [13.0, 4.0, 3.0]
    assert [one.accuracy for one in scores] == [1.0, 0.0, 0.0]


def test_a_reward_model_judges_no_answer():
    scores = score(Constant())
    assert [one.score for one in scores] == [12.0, 12.0, 9.0]
    assert all(one.accuracy is None for one in scores)


def test_both_are_added_with_their_weights_and_accuracy_is_that_of_the_answers():
    scores = score([(RLVRRewardModel(["number"]), 1.0), (Constant(), 0.5)])
    assert [one.score for one in scores] == [16.0, 7.0, 4.5]
    assert scores[0].parts == {"rlvr/number/format": 1.0, "rlvr/number/answer": 9.0, "reward_model/score": 6.0}
    assert [one.accuracy for one in scores] == [1.0, 0.0, 0.0]


def test_what_cannot_be_graded_has_no_score_whatever_the_model_says():
    (only,) = score([(RLVRRewardModel([lambda completion, gold: None]), 1.0), (Constant(), 1.0)], ["x"])
    assert only.score is None and only.reason == "not_scorable"


def test_no_completions_need_no_model():
    assert score(RLVRRewardModel(["number"]), []) == []


def test_a_reward_that_needs_metadata_says_so():
    with pytest.raises(ValueError, match="needs the metadata of each completion"):
        RLVRRewardModel([level_of])(["x"], ["1"])
