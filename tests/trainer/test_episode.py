"""What is said of an episode without a signal, and of a run of such episodes."""

from types import SimpleNamespace

import pytest

from coati_ext.trainer.episode import idle_text
from coati_ext.trainer.setup import check_training

UNSCORED = {"unscored": 1.0, "length/truncated": 1.0, "reasons/gold_unparseable": 1.0}


def test_an_episode_without_any_score_is_not_said_to_have_a_mean_of_0():
    text = idle_text(UNSCORED, 3)
    assert "(no reward; gold_unparseable 100%; 100% unscored" in text and "mean" not in text
    assert "mean 0.5;" in idle_text({**UNSCORED, "reward": 0.5}, 3)


def test_completions_that_are_all_masked_are_not_said_to_have_equal_rewards():
    metrics = {**UNSCORED, "reward": 1.0}
    assert "--mask_truncated leaves these out" in idle_text(metrics, 1, mask_truncated=True)
    assert "no group had" in idle_text({**metrics, "length/truncated": 0.9}, 1, mask_truncated=True)


def test_a_run_of_idle_steps_says_so_before_it_saves_nothing():
    trainer = SimpleNamespace(
        num_taken=0, next_update=3, num_idle=2, num_skipped=0, num_overflowed=0, optimizer=SimpleNamespace()
    )
    with pytest.raises(
        ValueError, match=r"none of the 2 steps was taken: 2 had no two completions .*; nothing is saved"
    ):
        check_training(trainer)
