"""A loop over tokens in fp64 for every loss and gradient, and what must not change them."""

import math

import pytest
import torch

from coati_ext.models.advantages import ADVANTAGES, group_advantages
from coati_ext.models.aggregation import AGGREGATIONS, Denominators, aggregate
from coati_ext.models.importance import IMPORTANCE_KINDS, importance_weights
from coati_ext.models.policy_loss import LOSSES, PolicyLoss, kl_terms
from coati_ext.utils.metric_sums import MetricSums

MAX_LENGTH = 8
LENGTHS = (3, 1, 6, 0, 2, 5)  # 0: an empty completion
EVERYTHING = {"kl_coef": 0.3, "importance": "token_truncate", "importance_cap": 1.1}


def make_batch(lengths=LENGTHS, width=6, seed=0, spread=0.4):
    """Log-probabilities of four policies that lie `spread` apart, advantages and mask."""
    generator = torch.Generator().manual_seed(seed)
    size = (len(lengths), width)
    log_probs = -torch.rand(size, generator=generator) * 3 - 0.1
    batch = {"log_probs": log_probs}
    for name in ("old", "ref", "sampler"):
        batch[name] = log_probs + spread * torch.randn(size, generator=generator)
    batch["advantages"] = torch.randn(len(lengths), generator=generator)
    batch["mask"] = torch.arange(width) < torch.tensor(lengths)[:, None]
    return batch


def run(batch, denominators=None, dtype=torch.float32, **settings):
    """(Loss, gradient, metrics) of a batch; ref and sampler are given if the settings want them."""
    batch = {name: value if name == "mask" else value.to(dtype) for name, value in batch.items()}
    log_probs = batch["log_probs"].clone().requires_grad_()
    loss, metrics = PolicyLoss(max_length=MAX_LENGTH, **settings)(
        log_probs,
        batch["old"],
        batch["advantages"],
        batch["mask"],
        denominators=denominators or Denominators.of([batch["mask"]]),
        ref_log_probs_BA=batch["ref"] if "kl_coef" in settings else None,
        sampler_log_probs_BA=batch["sampler"] if "importance" in settings else None,
    )
    loss.backward()
    return loss.detach(), log_probs.grad, metrics


def reduced(*metrics):
    sums = MetricSums()
    for part in metrics:
        sums.add(part)
    return sums.reduce()


def rows(batch, index):
    return {name: value[index] for name, value in batch.items()}


# --- against a loop over tokens in fp64


def token_loss(name, log_probs, old, advantage, low, high, dual):
    """The loss of each token of one sequence (lists of 0-dim tensors), from the definitions."""
    ratios = [torch.exp(new - before) for new, before in zip(log_probs, old, strict=True)]
    if name == "rloo":
        return [-advantage * new for new in log_probs]
    if name == "cispo":
        return [-min(r.item(), 1 + high) * advantage * new for r, new in zip(ratios, log_probs, strict=True)]
    if name == "gspo":
        total = sum(new - before for new, before in zip(log_probs, old, strict=True))
        ratios = [torch.exp(total / len(log_probs))] * len(log_probs)
    losses = []
    for r in ratios:
        bounded = 1 - low if r < 1 - low else 1 + high if r > 1 + high else r
        value = min(r * advantage, bounded * advantage)
        if dual is not None and advantage < 0:
            value = max(value, dual * advantage)
        losses.append(-value)
    return losses


def reference(batch, name, aggregation, low, high, dual, kl_coef=0.0, cap=None):
    """Loss and gradient, one sequence and token at a time."""
    log_probs = batch["log_probs"].double().requires_grad_()
    kept = [i for i, count in enumerate(batch["mask"].sum(-1).tolist()) if count]
    num_tokens, total = int(batch["mask"].sum()), torch.zeros((), dtype=torch.float64)
    for i in kept:
        length = int(batch["mask"][i].sum())
        old, ref, sampler = (batch[key][i, :length].double() for key in ("old", "ref", "sampler"))
        mine, advantage = list(log_probs[i, :length]), batch["advantages"][i].double()
        losses = token_loss(name, mine, list(old), advantage, low, high, dual)
        for t in range(length):
            weight = 1.0 if cap is None else min(torch.exp(old[t] - sampler[t]).item(), cap)
            d = mine[t] - ref[t]
            value = losses[t] * weight + kl_coef * (torch.exp(-d) - 1 + d)
            share = {
                "token-mean": 1 / num_tokens,
                "seq-mean-token-mean": 1 / len(kept) / length,
                "seq-mean-token-sum": 1 / len(kept),
                "seq-mean-token-sum-norm": 1 / len(kept) / MAX_LENGTH,
            }[aggregation]
            total = total + value * share
    total.backward()
    return total.detach(), log_probs.grad


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("extra", [{}, EVERYTHING], ids=["plain", "kl-and-importance"])
def test_every_loss_with_its_own_settings_equals_the_loop(name, extra):
    batch, kind = make_batch(), LOSSES[name]
    loss, gradient, _ = run(batch, loss=name, **extra)
    expected = reference(
        batch,
        name,
        kind.aggregation,
        kind.clip_eps_low,
        kind.clip_eps_high,
        None,
        kl_coef=extra.get("kl_coef", 0.0),
        cap=extra.get("importance_cap"),
    )
    torch.testing.assert_close(loss.double(), expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["grpo", "gspo"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_bounds_and_dual_clip_that_are_given_equal_the_loop(name, aggregation):
    batch = make_batch(spread=1.5, seed=2)
    batch["old"] -= 0.5  # for ratios of whole sequences above the dual clip as well
    given = {"clip_eps_low": 0.1, "clip_eps_high": 0.3, "dual_clip": 2.0}
    loss, gradient, _ = run(batch, loss=name, aggregation=aggregation, **given)
    expected = reference(batch, name, aggregation, *given.values())
    assert (loss - run(batch, loss=name, aggregation=aggregation, clip_eps_low=0.1, clip_eps_high=0.3)[0]).abs() > 1e-3
    torch.testing.assert_close(loss.double(), expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), expected[1], rtol=1e-5, atol=1e-6)


def test_the_table_is_the_published_one():
    assert {name: tuple(kind)[1:] for name, kind in LOSSES.items()} == {
        "grpo": ("seq-mean-token-mean", "group_std", 0.2, 0.2),
        "dr_grpo": ("seq-mean-token-sum-norm", "group_mean", 0.2, 0.2),
        "dapo": ("token-mean", "group_std", 0.2, 0.28),
        "gspo": ("seq-mean-token-mean", "group_std", 3e-4, 4e-4),
        "cispo": ("token-mean", "group_std", None, 4.0),
        "rloo": ("seq-mean-token-sum", "leave_one_out", None, None),
    }
    assert {kind.advantage for kind in LOSSES.values()} <= set(ADVANTAGES)


# --- what must not change the gradient


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("parts", [[[0], [1], [2], [3], [4], [5]], [[0, 1, 2, 3], [4, 5]], [[3], [0, 1, 2, 4, 5]]])
def test_micro_batches_and_ranks_add_up_to_the_whole(name, parts):
    batch = make_batch()
    loss, gradient, metrics = run(batch, loss=name, **EVERYTHING)
    counts = [Denominators.of([batch["mask"][part]]).counts for part in parts]  # as if each part had a rank to itself
    shares = [run(rows(batch, part), Denominators(sum(counts)), loss=name, **EVERYTHING) for part in parts]
    torch.testing.assert_close(sum(share[0] for share in shares), loss, rtol=1e-6, atol=1e-6)
    for part, (_, part_gradient, _) in zip(parts, shares, strict=True):
        torch.testing.assert_close(part_gradient, gradient[part], rtol=1e-6, atol=1e-7)
    assert reduced(*(share[2] for share in shares)) == pytest.approx(reduced(metrics), abs=1e-5)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("left, right", [(0, 5), (4, 0), (2, 3)])
def test_padding_changes_nothing(name, left, right):
    batch = make_batch()
    loss, gradient, metrics = run(batch, loss=name, **EVERYTHING)
    padded = {
        key: value
        if value.dim() == 1
        else torch.nn.functional.pad(value, (left, right), value=False if key == "mask" else 9.0)
        for key, value in batch.items()
    }
    padded_loss, padded_gradient, padded_metrics = run(padded, loss=name, **EVERYTHING)
    torch.testing.assert_close(padded_loss, loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(padded_gradient[:, left : left + 6], gradient, rtol=1e-6, atol=1e-7)
    assert padded_gradient.count_nonzero() == gradient.count_nonzero()
    assert reduced(padded_metrics) == pytest.approx(reduced(metrics), abs=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_the_order_of_samples_changes_nothing(name):
    batch, order = make_batch(), [4, 2, 0, 5, 3, 1]
    loss, gradient, _ = run(batch, loss=name, **EVERYTHING)
    other_loss, other_gradient, _ = run(rows(batch, order), loss=name, **EVERYTHING)
    torch.testing.assert_close(other_loss, loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(other_gradient, gradient[order], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", [name for name in LOSSES if LOSSES[name].advantage == "group_std"])
def test_scale_and_offset_of_rewards_change_nothing(name):
    rewards, batch = torch.tensor([[0.0, 1.0, 10.0], [3.0, 1.0, 1.0]]), make_batch()
    gradients = []
    for scaled in (rewards, 100 * rewards + 7):
        batch["advantages"] = group_advantages(scaled, "group_std")[0].flatten()
        gradients.append(run(batch, loss=name)[1])
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-6)  # STD_EPS beside a deviation of 1.15


# --- what must be exactly zero, one or finite


@pytest.mark.parametrize("name", LOSSES)
def test_equal_rewards_give_exactly_no_gradient_and_leave_the_kl_term(name):
    batch = make_batch()
    advantages, _ = group_advantages(torch.full((2, 3), 0.1), LOSSES[name].advantage)
    batch["advantages"] = advantages.flatten()
    loss, gradient, _ = run(batch, loss=name)
    assert loss.item() == 0 and not gradient.any()
    _, with_kl, _ = run(batch, loss=name, kl_coef=0.5)
    torch.testing.assert_close(with_kl, 0.5 * kl_gradient(batch, LOSSES[name].aggregation), rtol=1e-5, atol=1e-7)


def kl_gradient(batch, aggregation):
    log_probs = batch["log_probs"].clone().requires_grad_()
    kl = kl_terms(log_probs, batch["ref"], "k3")
    aggregate(kl, batch["mask"], aggregation, Denominators.of([batch["mask"]]), MAX_LENGTH).backward()
    return log_probs.grad


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("given", [True, False], ids=["old-given", "old-left-out"])
def test_the_first_pass_is_on_policy(name, given):
    batch = make_batch()
    log_probs = batch["log_probs"].requires_grad_()
    old = log_probs.detach().clone() if given else None
    denominators = Denominators.of([batch["mask"]])
    loss = PolicyLoss(loss=name, max_length=MAX_LENGTH)
    value, metrics = loss(log_probs, old, batch["advantages"], batch["mask"], denominators=denominators)
    value.backward()
    found = reduced(metrics)
    assert (found["ratio"], found["ratio_max"]) == (1.0, 1.0)
    assert all(share == 0 for metric, share in found.items() if metric.startswith("clip"))
    # All of them are the plain policy gradient then.
    plain = batch["log_probs"].detach().requires_grad_()
    aggregate(
        -batch["advantages"][:, None] * plain, batch["mask"], loss.aggregation, denominators, MAX_LENGTH
    ).backward()
    torch.testing.assert_close(log_probs.grad, plain.grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("lengths, width", [((0, 0), 4), ((0,), 0), ((), 3)])
def test_nothing_in_the_mask_is_zero_and_stays_in_the_graph(name, lengths, width):
    batch = make_batch(lengths, width)
    for denominators in (None, Denominators(torch.tensor([7, 2]))):
        loss, gradient, metrics = run(batch, denominators, loss=name, **EVERYTHING)
        assert loss.item() == 0 and gradient.shape == batch["log_probs"].shape and not gradient.any()
        assert set(reduced(metrics)) == {"policy_loss"}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("importance", IMPORTANCE_KINDS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_garbage_at_masked_positions_does_not_leak(name, importance, garbage):
    batch, settings = make_batch(), {"loss": name, "kl_coef": 0.3, "importance": importance}
    loss, gradient, metrics = run(batch, **settings)
    for key in ("log_probs", "old", "ref", "sampler"):
        batch[key] = batch[key].masked_fill(~batch["mask"], garbage)
    batch["advantages"][3] = garbage  # of the empty completion
    dirty_loss, dirty_gradient, dirty_metrics = run(batch, **settings)
    assert torch.equal(dirty_loss, loss) and torch.equal(dirty_gradient, gradient)
    assert reduced(dirty_metrics) == reduced(metrics)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("distance", [-500.0, 500.0])
def test_policies_far_apart_stay_finite(name, distance):
    batch = make_batch()
    for key in ("old", "ref", "sampler"):
        batch[key] = batch["log_probs"] + distance
    loss, gradient, metrics = run(batch, loss=name, **EVERYTHING)
    assert loss.isfinite() and gradient.isfinite().all() and all(map(math.isfinite, reduced(metrics).values()))


# --- terms


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_kl_term_is_weighed_and_its_metric_is_k3_unscaled(kind):
    batch = make_batch()
    loss, _, metrics = run(batch, loss="dapo", kl_coef=0.25, kl_kind=kind)
    without, _, _ = run(batch, loss="dapo")
    mask = batch["mask"]
    d = (batch["log_probs"] - batch["ref"])[mask].double()
    values = {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d}
    torch.testing.assert_close((loss - without).double(), 0.25 * values[kind].mean(), rtol=1e-4, atol=1e-6)
    found = reduced(metrics)
    assert found["kl"] == pytest.approx(values["k3"].mean().item(), rel=1e-5)
    assert found["policy_loss"] == pytest.approx(without.item(), rel=1e-6)


def test_k2_has_the_gradient_of_the_kl_on_policy_and_k1_none():
    # Expected over all words of one distribution, whose exact KL autograd knows.
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.tensor([0.0, 0.5, 0.2, -0.4], dtype=torch.float64), -1)

    def gradient(value):
        return torch.autograd.grad(value, logits)[0]

    log_probs = torch.log_softmax(logits, -1)
    exact = gradient((log_probs.exp() * (log_probs - ref)).sum())
    found = {}
    for kind in ("k1", "k2"):
        log_probs = torch.log_softmax(logits, -1)
        found[kind] = gradient((log_probs.exp().detach() * kl_terms(log_probs, ref, kind)).sum())
    torch.testing.assert_close(found["k2"], exact)
    torch.testing.assert_close(found["k1"], torch.zeros_like(exact))


def test_a_reference_without_coefficient_is_logged_only():
    batch = make_batch()
    _, gradient, metrics = run(batch, loss="grpo", kl_coef=0.0)
    assert torch.equal(gradient, run(batch, loss="grpo")[1]) and reduced(metrics)["kl"] > 0


def test_metrics_of_clipping_count_tokens():
    ratio = torch.tensor([[0.5, 1.0, 1.5, 9.0], [0.5, 1.0, 1.5, 4.0]])
    mask = torch.tensor([[True, True, True, False], [True, True, True, True]])
    loss = PolicyLoss(loss="grpo", dual_clip=3.0)
    _, metrics = loss(
        ratio.log(), torch.zeros(2, 4), torch.tensor([1.0, -1.0]), mask, denominators=Denominators.of([mask])
    )
    found = reduced(metrics)
    assert found["clip_high"] == pytest.approx(1 / 7)  # 1.5 of the good one
    assert found["clip_low"] == pytest.approx(1 / 7)  # 0.5 of the bad one
    assert found["clip_dual"] == pytest.approx(1 / 7)  # 4.0 of the bad one
    assert found["ratio"] == pytest.approx(10 / 7) and found["ratio_max"] == pytest.approx(4.0)


def test_mismatch_is_measured_also_without_a_correction():
    batch = make_batch()
    _, gradient, metrics = run(batch, loss="grpo", importance="none")
    assert torch.equal(gradient, run(batch, loss="grpo")[1])
    log_w = (batch["old"] - batch["sampler"])[batch["mask"]].double()
    k3, found = log_w.exp() - 1 - log_w, reduced(metrics)
    assert found["mismatch_kl"] == pytest.approx(k3.mean().item(), rel=1e-5)
    assert found["mismatch_kl_max"] == pytest.approx(k3.max().item(), rel=1e-5)
    assert "importance_weight" not in found


@pytest.mark.parametrize("kind", ["token_truncate", "token_mask", "sequence_mask", "geometric_mask"])
def test_importance_weighs_each_token_and_is_counted(kind):
    batch = make_batch()
    _, gradient, metrics = run(batch, loss="dapo", importance=kind, importance_cap=1.2)
    weights = importance_weights(batch["old"], batch["sampler"], batch["mask"], kind, 1.2)
    torch.testing.assert_close(gradient, run(batch, loss="dapo")[1] * weights.where(batch["mask"], 0))
    found, kept = reduced(metrics), weights[batch["mask"]].double()
    expected = (kept >= 1.2 - 1e-6) if kind == "token_truncate" else (kept == 0)
    assert 0 < found["importance_clipped"] < 1
    assert found["importance_clipped"] == pytest.approx(expected.double().mean().item())
    assert found["importance_weight"] == pytest.approx(kept.mean().item(), rel=1e-6)


# --- refusals


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"loss": "ppo"}, "unknown policy loss 'ppo'; known are grpo, dr_grpo"),
        ({"aggregation": "mean"}, "unknown aggregation 'mean'; known are token-mean"),
        ({"loss": "dr_grpo"}, "seq-mean-token-sum-norm needs max_length"),
        ({"loss": "dr_grpo", "max_length": 0}, "got 0"),
        ({"loss": "cispo", "clip_eps_low": 0.2}, "'cispo' has no use for clip_eps_low"),
        ({"loss": "cispo", "dual_clip": 3.0}, "'cispo' has no use for dual_clip"),
        ({"loss": "rloo", "clip_eps_high": 0.2, "dual_clip": 3.0}, "no use for clip_eps_high, dual_clip"),
        ({"clip_eps_low": 1.0}, "clip_eps_low must be at least 0 and below 1"),
        ({"clip_eps_high": -0.1}, "clip_eps_high must be at least 0"),
        ({"dual_clip": 1.0}, "dual_clip must be above 1"),
        ({"kl_coef": -0.1}, "kl_coef must be at least 0 and finite, got -0.1"),
        ({"kl_coef": math.nan}, "kl_coef must be"),
        ({"kl_kind": "k4"}, "unknown KL estimate 'k4'; known are k1, k2, k3"),
        ({"importance": "tis"}, "unknown importance correction 'tis'; known are none"),
        ({"importance_cap": 1.0}, "must be above 1, got 1.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        PolicyLoss(**settings)


@pytest.mark.parametrize(
    "settings, change, said",
    [
        ({"kl_coef": 0.1}, {}, "kl_coef 0.1 needs the log-probabilities of the reference"),
        ({"importance": "token_mask"}, {}, "'token_mask' needs the log-probabilities that the sampler gave"),
        ({}, {"log_probs": torch.zeros(2, 3).half()}, "must be fp32, got torch.float16"),
        ({}, {"log_probs": torch.zeros(3)}, r"must be \(sequences, tokens\), got \(3,\)"),
        ({}, {"advantages": torch.zeros(2, 1)}, r"2 sequences but advantages \(2, 1\)"),
        ({}, {"old": torch.zeros(2, 4)}, r"shape of the old log-probabilities is \(2, 4\)"),
        ({}, {"mask": torch.ones(1, 3, dtype=torch.bool)}, r"shape of the action mask is \(1, 3\)"),
    ],
)
def test_batches_that_do_not_fit_are_refused(settings, change, said):
    batch = {
        "log_probs": torch.zeros(2, 3),
        "old": torch.zeros(2, 3),
        "advantages": torch.zeros(2),
        "mask": torch.ones(2, 3, dtype=torch.bool),
        **change,
    }
    with pytest.raises(ValueError, match=said):
        PolicyLoss(**settings)(*batch.values(), denominators=Denominators(torch.tensor([6, 2])))
