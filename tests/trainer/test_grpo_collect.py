"""What a collection gives on the edges, under other layouts and with dynamic sampling, on tiny models in fp32."""

import math
from pathlib import Path

import pytest
import torch.distributed as dist
from distributed import pool
from tiny_grpo import Layout, adapter_of, boost, fit, hashed, make_trainer, same_bits, write_prompts
from tiny_models import VOCAB

from coati_ext.models.reward_score import Score


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    return write_prompts(tmp_path, [str(number) for number in range(16)])


# --- completions at the edges


def at_the_edges(prompts, reward, layout, settings) -> dict:
    boosted = boost("mixtral", layout, lr=0.1)
    before = adapter_of(boosted.inner)
    trainer = make_trainer(boosted, reward, prompts=prompts, plan=(2, 1, 2), accumulation_steps=2, **settings)
    rows = fit(trainer)
    after = adapter_of(boosted.inner)
    return {
        "rows": rows,
        "changed": not same_bits(after, before),
        "finite": all(p.isfinite().all() for p in after.values()),
        "counts": (trainer.num_updates, trainer.num_idle, trainer.num_skipped),
        "lengths": [len(completion.ids) for completion in trainer.samples],
    }


@pytest.mark.parametrize("layout", [Layout(ep=2), Layout(zero_stage=2)])
def test_completions_that_stop_at_once_are_trained_on(prompts, layout):
    settings = {"stop_token_ids": list(range(VOCAB))}
    for found in pool(2).run(at_the_edges, prompts, hashed, layout, settings):
        assert set(found["lengths"]) == {1} and found["finite"] and found["changed"]
        assert found["rows"][-1]["length/truncated"] == 0


@pytest.mark.parametrize("layout", [Layout(ep=2), Layout()])
def test_completions_that_were_all_cut_are_left_out(prompts, layout):
    settings = {"max_new_tokens": 3, "min_new_tokens": 3, "mask_truncated": True, "kl_coef": 0.1}
    settings |= {"stop_token_ids": [2]}  # which none of these completions draws
    for found in pool(2).run(at_the_edges, prompts, hashed, layout, settings):
        assert found["rows"][0]["length/truncated"] == 1 and "length/ended" not in found["rows"][0]
        assert not found["changed"] and found["counts"] == (8, 8, 0)


def only_rank_0(completion, gold):
    return hashed(completion, gold) if dist.get_rank() == 0 else None


@pytest.mark.parametrize("layout", [Layout(ep=2), Layout(zero_stage=0), Layout(zero_stage=2)])
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_a_rank_with_nothing_in_the_loss_waits_for_the_others(prompts, layout, kl_coef):
    first, second = pool(2).run(at_the_edges, prompts, only_rank_0, layout, {"kl_coef": kl_coef})
    for found in (first, second):
        assert found["finite"] and found["changed"] and found["counts"][2] == 0
        assert found["rows"][0]["unscored"] == 0.5
        assert all(math.isfinite(value) for row in found["rows"] for value in row.values())
    assert first["counts"] == second["counts"]


# --- more ranks draw what one draws


def collected(prompts, family, num_prompts, layout) -> list:
    boosted = boost(family, layout, lr=0.3)
    trainer = make_trainer(boosted, prompts=prompts, num_prompts=num_prompts, plan=(3, 1, 1), kl_coef=0.05)
    seen = []

    def after_episode(trainer) -> dict[str, float]:
        seen.append([(c.prompt["number"], c.prompt["text"], c.ids, c.score.score) for c in trainer.samples])
        return {}

    fit(trainer, after_episode=after_episode)
    return seen


@pytest.mark.parametrize(
    ("processes", "layout", "family"),
    [
        (2, Layout(), "mixtral"),
        (2, Layout(ep=2), "mixtral"),
        (2, Layout(zero_stage=2), "mixtral"),
        (4, Layout(ep=2), "mixtral"),
        (2, Layout(tp=2), "llama"),
        (4, Layout(tp=2, zero_stage=0), "llama"),
    ],
    ids=["dp 2", "ep 2", "ZeRO 2", "ep 2 x dp 2", "tp 2", "tp 2 x dp 2"],
)
def test_layouts_draw_the_prompts_and_completions_of_one_process(prompts, processes, layout, family):
    (whole,) = pool(1).run(collected, prompts, family, 4, Layout())
    ranks = pool(processes).run(collected, prompts, family, 4 * layout.tp // processes, layout)
    parts = ranks[:: layout.tp]  # those between have the same
    for episode, expected in enumerate(whole):
        assert [row for part in parts for row in part[episode]] == expected, f"episode {episode + 1}"
    assert len({tuple(ids) for episode in whole for _, _, ids, _ in episode}) > 40  # few alike, all of them short


# --- dynamic sampling


def right_unless_asked(completion, gold):
    """Gold "easy": always right, though paid by its length; gold "open": right or wrong."""
    accuracy = 1.0 if gold == "easy" else float(hashed(completion, gold) > 0)
    score = accuracy + 0.01 * len(completion.split())
    return Score(score=score, accuracy=accuracy, parts={"score": score}, reason="correct" if accuracy else "wrong")


def with_rounds(prompts, rounds) -> dict:
    boosted = boost("mixtral", lr=0.0)
    trainer = make_trainer(
        boosted, right_unless_asked, prompts=prompts, num_prompts=3, dynamic_sampling_rounds=rounds, num_generations=6
    )
    fit(trainer)
    groups = [trainer.samples[first : first + 6] for first in range(0, 18, 6)]
    again = make_trainer(
        boosted, right_unless_asked, prompts=prompts, num_prompts=3, dynamic_sampling_rounds=rounds, num_generations=6
    )
    again.load_shared_state(trainer.shared_state())
    following = [[p["number"] for p in one.loader.next()] for one in (trainer, again)]
    return {
        "golds": [group[0].prompt["gt_answer"] for group in groups],
        "differ": [len({completion.score.accuracy for completion in group}) > 1 for group in groups],
        "position": trainer.loader.sampler.position,
        "rows": len(trainer.samples),
        "following": following,
        "numbers": sorted({group[0].prompt["number"] for group in groups}),
    }


@pytest.mark.parametrize("processes", [1, 2])
def test_groups_that_are_all_right_are_replaced_whatever_they_are_paid(tmp_path, processes):
    prompts = write_prompts(tmp_path, ["easy", "open"] * 12)
    for found in pool(processes).run(with_rounds, prompts, 6):
        assert found["rows"] == 18 and all(found["differ"]) and set(found["golds"]) == {"open"}
        assert found["following"][0] == found["following"][1]
        assert found["following"][0][0] >= found["position"] - 3 * processes > max(found["numbers"])


@pytest.mark.parametrize("rounds", [0, 2])
@pytest.mark.parametrize("processes", [1, 2])
def test_rounds_are_bounded_and_ranks_stay_in_step(tmp_path, processes, rounds):
    prompts = write_prompts(tmp_path, ["easy"] * 24)
    found = pool(processes).run(with_rounds, prompts, rounds)
    assert {one["rows"] for one in found} == {18}  # others stand in, so that every rank has its share
    assert {one["position"] for one in found} == {3 * processes * (1 + rounds) + 3 * processes}


# --- rows without an advantage


def half_constant(completion, gold):
    return 1 if int(gold) % 2 else hashed(completion, gold)


def nothing_on_rank_1(completion, gold):
    return hashed(completion, gold) if dist.get_rank() == 0 else 1


def adapter_after_two_episodes(prompts, reward, layout, kl_coef, settings) -> tuple:
    """(Adapter, tokens that were trained on in episode 1 over all ranks, steps that were taken)."""
    boosted = boost("mixtral", layout, lr=0.1)
    trainer = make_trainer(boosted, reward, prompts=prompts, plan=(2, 1, 2), kl_coef=kl_coef, **settings)
    rows = fit(trainer)
    return adapter_of(boosted.inner), rows[0]["tokens_per_s/train"] * rows[0]["seconds/train"], trainer.num_taken


@pytest.mark.parametrize(
    ("processes", "layout", "reward"),
    [
        (1, Layout(), half_constant),
        (2, Layout(zero_stage=2), half_constant),
        (2, Layout(ep=2), half_constant),
        (2, Layout(ep=2), nothing_on_rank_1),
        (2, Layout(zero_stage=0), nothing_on_rank_1),
    ],
)
@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo"])
def test_rows_that_have_no_gradient_count_in_the_loss_whether_they_are_computed_or_not(
    prompts, processes, layout, reward, loss
):
    """A KL term of almost no weight has every row computed."""
    settings = {"loss": loss, "train_batch_size": 3, "accumulation_steps": 3}
    lean = pool(processes).run(adapter_after_two_episodes, prompts, reward, layout, 0.0, settings)
    full = pool(processes).run(adapter_after_two_episodes, prompts, reward, layout, 1e-9, settings)
    for (ours, tokens, taken), (expected, all_tokens, _) in zip(lean, full, strict=True):
        assert taken > 0 and tokens < 0.9 * all_tokens
        for name, exact in expected.items():
            assert (ours[name] - exact).norm() <= 1e-4 * exact.norm(), name
