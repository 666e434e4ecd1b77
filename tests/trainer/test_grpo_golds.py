"""Golds that the rewards cannot read are told of before anything is drawn."""

from types import SimpleNamespace

import pytest
from distributed import pool


def check(golds: list, reward: str = "number", held_out: list | None = None, **metadata):
    import torch.distributed as dist

    from coati_ext.models.reward import RLVRRewardModel
    from coati_ext.models.reward_score import REWARDS
    from coati_ext.trainer.grpo_setup import check_golds

    def prompts(golds: list, file: str) -> list:
        rest = {"text": "?", "metadata": metadata}
        return [{"gt_answer": gold, "source": f"{file}:{line}", **rest} for line, gold in enumerate(golds, 1)]

    config = SimpleNamespace(reward=SimpleNamespace(reward_functions=[reward]))
    data = SimpleNamespace(
        prompts=SimpleNamespace(dataset=prompts(golds, "p.jsonl")),
        held_out=prompts(held_out, "e.jsonl") if held_out else None,
    )
    model = RLVRRewardModel([reward]) if reward in REWARDS or dist.get_rank() == 0 else None
    try:
        check_golds(config, model, data)
    except ValueError as error:
        return str(error)


def test_a_reward_that_reads_none_of_them_ends_the_run_on_all_ranks():
    first, second = pool(2).run(check, ["Paris", "Rome"])
    text = "--reward_functions number cannot read the gt_answer of 2 of the first 2 prompts (p.jsonl:1: 'Paris')"
    assert first == text and second == f"rank 0: {text}"


def test_held_out_golds_are_read_too():
    first, _ = pool(2).run(check, ["4"], "number", ["Paris"])
    assert "cannot read the gt_answer of 1 of the first 1 prompts (e.jsonl:1: 'Paris')" in first


def test_some_that_cannot_be_read_do_not_end_it():
    assert pool(2).run(check, ["4", "Rome", "7"]) == [None, None]


@pytest.mark.parametrize("reward", ["number", "exact_match"])
def test_golds_that_can_be_read_pass(reward):
    assert pool(2).run(check, ["4", "1,234"], reward) == [None, None]


def test_what_a_reward_lacks_is_said_before_training():
    first, _ = pool(2).run(check, ["4"], "reasoning_gym")
    assert "--reward_functions: reward reasoning_gym failed on sample 0" in first
    assert "needs prompts that prepare_dataset.py made" in first


def test_functions_of_the_user_are_not_called():
    assert pool(2).run(check, ["4"], f"{__name__}:raises") == [None, None]


def raises(completion, gold):
    raise ZeroDivisionError
