"""What must hold of a GRPO run, on tiny random models in fp32. Tolerances are those of fp32 sums in another order."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import pool
from tiny_grpo import Layout, adapter_of, boost, fit, hashed, make_trainer, same_bits, write_prompts
from tiny_models import tiny_model

from coati_ext.models.completion_log_probs import CompletionLogProbs

ON_POLICY = 1e-6  # of mismatch_kl, a k3 estimate: the square of what rounding does to log-probabilities


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    return write_prompts(tmp_path, [str(number) for number in range(16)])


def constant(completion, gold):
    return 3.0


def not_scorable(completion, gold):
    return None


def drawn(trainer) -> tuple:
    """A collection of this rank: (experience, metrics)."""
    return trainer.experience_maker.make_experience(
        trainer.loader.next, trainer.loader.sampler.num_prompts, trainer.sampling
    )


# --- nothing to learn from


def without_signal(prompts, reward, layout, settings) -> dict:
    boosted = boost("mixtral", layout, adam=True)
    before = adapter_of(boosted.inner)
    trainer = make_trainer(boosted, reward, prompts=prompts, plan=(3, 1, 2), accumulation_steps=2, **settings)
    rows = fit(trainer)
    return {
        "unchanged": same_bits(adapter_of(boosted.inner), before),
        "counts": (trainer.num_updates, trainer.num_idle, trainer.num_taken, trainer.num_skipped),
        "states": len(boosted.optimizer.optim.state),
        "rows": rows,
    }


@pytest.mark.parametrize("reward", [constant, not_scorable])
@pytest.mark.parametrize(("processes", "layout"), [(1, Layout()), (2, Layout(ep=2)), (2, Layout(zero_stage=2))])
def test_rewards_that_never_differ_leave_the_adapter_as_it_is_bit_for_bit(prompts, reward, processes, layout):
    for found in pool(processes).run(without_signal, prompts, reward, layout, {}):
        assert found["unchanged"] and found["states"] == 0
        assert found["counts"] == (12, 12, 0, 0)  # 3 episodes of 2 passes of 2 steps, all counted as idle
        for row in found["rows"]:
            assert row["idle"] == 4 and "grad_norm" not in row and row["tokens_per_s/train"] == 0
            assert row["unscored"] == (reward is not_scorable) and row["zero_variance"] == 1
            assert ("reward" in row) == (reward is constant)


@pytest.mark.parametrize("processes", [1, 2])
def test_without_scores_nothing_is_trained_even_with_a_kl_term(prompts, processes):
    for found in pool(processes).run(without_signal, prompts, not_scorable, Layout(), {"kl_coef": 0.5}):
        assert found["unchanged"] and found["counts"] == (12, 12, 0, 0)


def kl_step(prompts) -> tuple:
    """Gradients of a step without a signal, and those of the KL term on its own."""
    boosted = boost("mixtral", lr=1e-12)
    trainer = make_trainer(boosted, constant, prompts=prompts, kl_coef=0.5, train_batch_size=16)
    experience, _ = drawn(trainer)
    mask_BA = experience.action_mask
    log_probs_BA, _ = trainer.experience_maker.log_probs(experience.sequences, mask_BA, 1.0)
    d_BA = experience.reference_log_probs - log_probs_BA
    k3_BA = (d_BA.exp() - 1 - d_BA).where(mask_BA, 0)
    loss = 0.5 * (k3_BA.sum(-1) / mask_BA.sum(-1)).mean()
    boosted.booster.backward(loss, boosted.optimizer)
    expected = gradients_of(boosted)
    boosted.optimizer.zero_grad()
    return gradients_of_step(trainer, boosted, experience), expected


def gradients_of(boosted) -> dict:
    trained = ((name, p) for name, p in boosted.inner.named_parameters() if p.requires_grad)
    return {name: boosted.optimizer.get_param_grad(p).clone() for name, p in trained}


def gradients_of_step(trainer, boosted, experience) -> dict:
    found, upstream_step = {}, type(boosted.optimizer).step

    def recording_step() -> None:
        found.update(gradients_of(boosted))
        upstream_step(boosted.optimizer)

    boosted.optimizer.step = recording_step
    trainer.train_step([experience], [])
    return found


def test_a_group_without_variance_keeps_the_kl_term_alone(prompts):
    ((found, expected),) = pool(1).run(kl_step, prompts)
    assert found.keys() == expected.keys() and max(g.norm() for g in expected.values()) > 1e-3
    for name, exact in expected.items():
        torch.testing.assert_close(found[name], exact, rtol=1e-4, atol=1e-6)


def some_not_scorable(completion, gold):
    return None if len(completion.split()) % 4 == 0 else hashed(completion, gold)


def partly_scored(prompts) -> dict:
    boosted = boost("llama", lr=1e-12)
    trainer = make_trainer(boosted, some_not_scorable, prompts=prompts, train_batch_size=16, num_prompts=8)
    experience, _ = drawn(trainer)
    scored = experience.reward.isfinite()
    return {
        "rewards": experience.reward,
        "advantages": experience.advantages,
        "masked": ~experience.action_mask.any(-1),
        "with": gradients_of_step(trainer, boosted, experience),
        "without": gradients_of_step(trainer, boosted, experience.take(scored.nonzero().squeeze(-1))),
    }


def test_a_completion_without_a_score_touches_no_other(prompts):
    (found,) = pool(1).run(partly_scored, prompts)
    rewards_PG = found["rewards"].view(8, 4)
    unscored = rewards_PG.isnan()
    assert 0 < unscored.sum() < 32 and torch.equal(found["masked"], unscored.flatten())
    for rewards_G, advantages_G in zip(rewards_PG, found["advantages"].view(8, 4), strict=True):
        valid = rewards_G[~rewards_G.isnan()]
        spread = valid.std() if len(valid) > 1 else torch.tensor(0.0)
        expected = (valid - valid.mean()) / (spread + 1e-4) if spread > 0 else torch.zeros(len(valid))
        torch.testing.assert_close(advantages_G[~rewards_G.isnan()], expected)
        assert not advantages_G[rewards_G.isnan()].any()
    assert max(gradient.norm() for gradient in found["without"].values()) > 1e-3
    for name, exact in found["without"].items():
        torch.testing.assert_close(found["with"][name], exact, rtol=1e-4, atol=1e-6)


def nan_on_rank_1(completion, gold):
    return math.nan if dist.get_rank() == 1 else 1.0


def raising_on_rank_1(completion, gold):
    if dist.get_rank() == 1:
        raise KeyError("no such answer")
    return 1.0


def error_of(prompts, reward, layout, family="mixtral") -> str:
    trainer = make_trainer(boost(family, layout), reward, prompts=prompts)
    try:
        fit(trainer)
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("reward", "said"),
    [(nan_on_rank_1, "score of a reward is nan"), (raising_on_rank_1, "KeyError: 'no such answer'")],
)
@pytest.mark.parametrize("layout", [Layout(), Layout(ep=2)])
def test_a_reward_that_fails_on_one_rank_ends_all_and_is_named(prompts, reward, said, layout):
    for message in pool(2).run(error_of, prompts, reward, layout):
        assert f"reward {reward.__name__} failed on sample 0" in message and said in message


def raising_on_rank_0(completion, gold):
    if dist.get_rank() == 0:
        raise KeyError("no such answer")
    return 1.0


def test_a_reward_that_fails_ends_the_ranks_that_share_a_matrix_too(prompts):
    """They have the same completions, which the first of them grades."""
    for message in pool(4).run(error_of, prompts, raising_on_rank_0, Layout(tp=2), "llama"):
        assert "KeyError: 'no such answer'" in message


def of_this_rank(completion, gold):
    """As a grader that sometimes meets its deadline."""
    return (hashed(completion, gold) + dist.get_rank()) % 3


def collection_of(prompts) -> tuple:
    trainer = make_trainer(boost("llama", Layout(tp=2)), of_this_rank, prompts=prompts)
    experience, _ = drawn(trainer)
    return experience.reward, [completion.ids for completion in trainer.samples]


def test_ranks_that_share_a_matrix_have_the_same_completions_and_rewards(prompts):
    (rewards, ids), other = pool(2).run(collection_of, prompts)
    assert torch.equal(rewards, other[0]) and len(rewards.unique()) > 1
    assert ids == other[1]


# --- ratio, mismatch and temperature


def rows_of(prompts, plan, lr, settings, family="mixtral") -> list[dict]:
    boosted = boost(family, lr=lr)
    trainer = make_trainer(boosted, prompts=prompts, plan=plan, **settings)
    return fit(trainer)


def test_the_first_step_of_an_episode_has_a_ratio_of_exactly_1_and_clips_nothing(prompts):
    for row in pool(1).run(rows_of, prompts, (3, 2, 1), 0.5, {"dual_clip": 3.0})[0]:
        assert row["ratio"] == 1.0 == row["ratio_max"]
        assert row["clip_low"] == row["clip_high"] == row["clip_dual"] == 0
        assert row["grad_norm"] > 0 and abs(row["loss"]) < 1  # there was something to learn


def test_without_a_learning_rate_the_ratio_stays_1_over_many_steps(prompts):
    steps = {"accumulation_steps": 1, "train_batch_size": 3}
    for row in pool(1).run(rows_of, prompts, (3, 1, 2), 0.0, steps)[0]:
        assert row["ratio"] == pytest.approx(1, abs=1e-5) and row["ratio_max"] == pytest.approx(1, abs=1e-5)
        assert row["clip_low"] == row["clip_high"] == 0
        assert row["mismatch_kl_max"] < ON_POLICY
    moved = pool(1).run(rows_of, prompts, (3, 1, 2), 0.5, steps)[0]
    assert max(row["ratio_max"] for row in moved) > 1.1  # what the above would show if the weights moved


@pytest.mark.parametrize("family", ["mixtral", "llama"])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_the_sampler_and_the_trainer_have_the_same_probabilities(prompts, family, temperature):
    settings = {"temperature": temperature, "accumulation_steps": 2, "importance": "token_truncate"}
    for row in pool(1).run(rows_of, prompts, (2, 1, 2), 0.2, settings, family)[0]:
        assert row["mismatch_kl_max"] < ON_POLICY
        assert row["importance_weight"] == pytest.approx(1, abs=1e-5) and row["importance_clipped"] == 0
        assert row["temperature"] == temperature


@pytest.mark.parametrize("cut", [{"top_p": 0.5}, {"top_k": 5}])
def test_a_cut_distribution_is_corrected_for(prompts, cut):
    for row in pool(1).run(rows_of, prompts, (2, 1, 1), 0.2, cut)[0]:
        assert row["mismatch_kl"] > 0.01 and row["importance_weight"] < 0.9  # the sampler's tokens were likelier


def annealed(prompts) -> dict:
    boosted = boost("mixtral", lr=0.0)
    temperatures = {"start_temperature": 1.5, "end_temperature": 0.5}
    trainer = make_trainer(boosted, prompts=prompts, plan=(3, 1, 2), temperature_annealing_config=temperatures)
    distances = []

    def after_episode(trainer) -> dict[str, float]:
        for c in trainer.samples:
            ids = torch.tensor([c.prompt["input_ids"] + c.ids])
            with torch.no_grad():
                logits_AV = boosted.inner(ids, use_cache=False).logits[0, len(c.prompt["input_ids"]) - 1 : -1]
            temperature = 1.5 - 0.5 * (trainer.episode - 1)
            found_A = (logits_AV / temperature).log_softmax(-1).gather(-1, torch.tensor(c.ids)[:, None])[:, 0]
            distances.append((found_A - torch.tensor(c.log_probs)).abs().max().item())
        return {}

    return {"rows": fit(trainer, after_episode=after_episode), "distance": max(distances)}


def test_log_probabilities_follow_the_annealed_temperature_when_drawn_and_when_trained(prompts):
    (found,) = pool(1).run(annealed, prompts)
    assert [row["temperature"] for row in found["rows"]] == [1.5, 1.0, 0.5]
    assert found["distance"] < 1e-4
    assert all(row["mismatch_kl_max"] < ON_POLICY for row in found["rows"])
    assert all(row["ratio_max"] == pytest.approx(1, abs=1e-5) for row in found["rows"])
    assert [row["entropy"] for row in found["rows"]] == sorted((r["entropy"] for r in found["rows"]), reverse=True)


# --- the reference


def references(prompts, family) -> dict:
    boosted = boost(family)
    everything = {"num_prompts": 4, "logits_forward_batch_size": 16, "kl_coef": 0.1}
    trainer = make_trainer(boosted, prompts=prompts, plan=(1, 1, 2), **everything)
    experience, _ = drawn(trainer)
    base = boost(family, random_adapter=False).inner  # lora_B is zero
    ordered = experience.take(experience.attention_mask.sum(-1).argsort())
    found = {name: log_probs_of(model, ordered) for name, model in (("base", base), ("stock", tiny_model(family)))}
    return found | {"reference": ordered.reference_log_probs, "policy": ordered.action_log_probs}


@torch.no_grad()
def log_probs_of(model, experience) -> torch.Tensor:
    return CompletionLogProbs(model)(experience.sequences, experience.action_mask, 1.0)[0]


@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v3"])
def test_the_reference_is_the_base_model_bit_for_bit(prompts, family):
    (found,) = pool(1).run(references, prompts, family)
    assert torch.equal(found["reference"], found["base"])
    torch.testing.assert_close(found["reference"], found["stock"], rtol=0, atol=1e-4)
    if family == "llama":  # transformers adds up its own experts in another order
        assert torch.equal(found["reference"], found["stock"])
    assert (found["policy"] - found["reference"]).abs().max() > 0.1


def from_the_base(prompts) -> list[dict]:
    boosted = boost("mixtral", Layout(ep=2), random_adapter=False, lr=0.5)
    return fit(make_trainer(boosted, prompts=prompts, plan=(4, 1, 1), kl_coef=0.01))


def test_the_kl_to_the_reference_is_0_at_first_and_grows(prompts):
    rows, others = pool(2).run(from_the_base, prompts)
    assert [row["kl"] for row in rows] == [row["kl"] for row in others]
    assert rows[0]["kl"] < 1e-10 and rows[-1]["kl"] > 1e-5  # batches of other shapes round in another way


def test_arguments_without_a_meaning_are_refused():
    (found,) = pool(1).run(refusals)
    for expected, message in found:
        assert expected in message


def refusals() -> list[tuple[str, str]]:
    boosted = boost("llama")
    found = []
    for settings, expected in (
        ({"vf_coef": 0.1}, "vf_coef=0.1 is refused: GRPO has no value function"),
        ({"apply_loss_mask": False}, "apply_loss_mask=False is refused"),
        ({"do_sample": False}, "do_sample=False draws the same completion"),
        ({"num_generatoins": 3}, "GRPOTrainer has no argument num_generatoins"),
        ({"loss": "gpro"}, "unknown policy loss 'gpro'"),
        ({"advantage": "std"}, "unknown advantage 'std'"),
        ({"ptx_coef": 0.5}, "ptx_coef is 0.5: above 0 and pretrain_dataloader go together"),
        ({"stop_token_ids": []}, "stop_token_ids is []"),
    ):
        try:
            make_trainer(boosted, **settings)
        except ValueError as error:
            found.append((expected, str(error)))
        else:
            found.append((expected, "accepted"))
    return found
