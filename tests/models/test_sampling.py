"""The draw of one token: its distribution, and that its noise belongs to the row and step alone."""

import pytest
import torch

from coati_ext.models.sampling import Sampling, draw_tokens, gumbel_noise, noise_of_step, row_key

NUM_DRAWS = 40_000
LOGITS_V = torch.tensor([2.0, -1.0, 0.5, 0.0, 1.5, -30.0, 0.5])


def frequencies(**limits) -> torch.Tensor:
    key_B = torch.tensor([row_key((3,), 0, sample) for sample in range(NUM_DRAWS // 8)]).repeat(8)
    step_B = torch.arange(8).repeat_interleave(NUM_DRAWS // 8)
    token_B, _ = draw_tokens(
        LOGITS_V.expand(NUM_DRAWS, -1), Sampling(max_new_tokens=1, stop_ids=(), **limits), key_B, step_B
    )
    return token_B.bincount(minlength=len(LOGITS_V)) / NUM_DRAWS


@pytest.mark.parametrize(
    "limits, kept",
    [
        ({}, [0, 1, 2, 3, 4, 5, 6]),
        ({"temperature": 2.0}, [0, 1, 2, 3, 4, 5, 6]),
        ({"top_k": 2}, [0, 4]),
        ({"top_k": 99}, [0, 1, 2, 3, 4, 5, 6]),
        ({"top_p": 0.7}, [0, 4]),  # 0.473 + 0.287
        ({"top_p": 0.4}, [0]),
        ({"top_k": 2, "top_p": 0.7}, [0, 4]),  # of the two: 0.622 + 0.378
        ({"top_k": 2, "top_p": 0.6}, [0]),
    ],
)
def test_tokens_come_as_often_as_their_probability(limits, kept):
    expected_V = torch.zeros(len(LOGITS_V))
    expected_V[kept] = (LOGITS_V[kept] / limits.get("temperature", 1.0)).softmax(-1)
    # Five standard deviations of a count; exact where nothing is left to chance.
    slack_V = 5 * (expected_V * (1 - expected_V) / NUM_DRAWS).sqrt()
    assert ((frequencies(**limits) - expected_V).abs() <= slack_V).all()


def test_noise_is_gumbel_and_unlike_between_rows_steps_and_tokens():
    key_B = torch.tensor([row_key((9, -1, 2**70), prompt, 0) for prompt in range(60)])
    token_BK = torch.arange(50).expand(60, -1)
    steps = [gumbel_noise(noise_of_step(key_B, torch.full_like(key_B, step)), token_BK) for step in range(40)]
    noise = torch.stack(steps).double()
    uniform = (-(-noise).exp()).exp()
    tenths = (uniform * 10).long().flatten().bincount(minlength=10) / noise.numel()
    assert (tenths - 0.1).abs().max() < 5 * (0.09 / noise.numel()) ** 0.5
    for dim in range(3):
        pair = torch.stack([uniform.flatten(), uniform.roll(1, dim).flatten()])
        assert abs(torch.corrcoef(pair)[0, 1]) < 5 / noise.numel() ** 0.5


def test_noise_of_step_is_splitmix64():
    """First outputs of the reference generator from the seed 1234567 (Vigna, splitmix64.c)."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    found = noise_of_step(torch.full((3,), 1234567), torch.arange(3))
    assert [value % (1 << 64) for value in found.tolist()] == expected


def test_rounding_of_the_logits_seldom_changes_the_token():
    generator = torch.Generator().manual_seed(0)
    logits_BV = 2 * torch.randn(300, 10_000, generator=generator)
    other_BV = logits_BV + 1e-5 * torch.randn(logits_BV.shape, generator=generator)
    sampling, key_B = Sampling(max_new_tokens=1, stop_ids=()), torch.arange(300) * 7919
    tokens, others = (draw_tokens(x, sampling, key_B, torch.zeros_like(key_B))[0] for x in (logits_BV, other_BV))
    assert (tokens != others).sum() <= 1


def test_the_tail_of_a_large_vocabulary_is_drawn():
    """Mass 0.5 on one token, the rest spread over 2**16, of which each has a chance of 8e-6."""
    logits_V = torch.zeros(2**16 + 1)
    logits_V[0] = 16 * torch.tensor(2.0).log()
    key_B = torch.arange(600) * 7919
    sampling = Sampling(max_new_tokens=1, stop_ids=())
    token_B, log_prob_B = draw_tokens(logits_V.expand(600, -1), sampling, key_B, torch.zeros_like(key_B))
    tail = token_B[token_B > 0]
    assert abs(len(tail) / 600 - 0.5) < 5 * (0.25 / 600) ** 0.5
    assert abs((tail > 2**15).float().mean() - 0.5) < 5 * (0.25 / 300) ** 0.5
    torch.testing.assert_close(log_prob_B, logits_V.log_softmax(-1)[token_B])


def test_noise_goes_with_the_token_not_with_its_place():
    logits_BV = torch.randn(50, 30, generator=torch.Generator().manual_seed(2))
    key_B, step_B = torch.arange(50) * 7919, torch.zeros(50).long()
    tokens, sorted_tokens = (
        draw_tokens(logits_BV, Sampling(max_new_tokens=1, stop_ids=(), top_k=top_k), key_B, step_B)[0]
        for top_k in (0, 30)
    )
    assert torch.equal(tokens, sorted_tokens)
