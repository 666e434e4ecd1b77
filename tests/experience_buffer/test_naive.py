"""The experience buffer: rows come back as they went in, whatever they were padded to."""

import pytest
import torch

from coati_ext.experience_buffer import Experience, NaiveExperienceBuffer


def experience(lengths: list[int], *, width: int | None = None, reference: bool = True, start: int = 0) -> Experience:
    """Completions of `lengths` tokens, the first of which is the prompt; numbers that tell the rows apart."""
    width = width or max(lengths)
    lengths_B1 = torch.tensor(lengths)[:, None]
    rows_B1 = start + torch.arange(len(lengths))[:, None] + 1
    mask_BS = torch.arange(width) < lengths_B1
    values_BS = mask_BS * (100 * rows_B1 + torch.arange(width))
    return Experience(
        sequences=values_BS,
        attention_mask=mask_BS,
        action_mask=mask_BS[:, 1:],
        action_log_probs=-values_BS[:, 1:].float(),
        sampler_log_probs=-values_BS[:, 1:].float() - 1.0 * mask_BS[:, 1:],
        reference_log_probs=-2.0 * values_BS[:, 1:] if reference else None,
        reward=rows_B1[:, 0].float(),
        advantages=rows_B1[:, 0] / 2,
    )


def assert_equal(ours: Experience, expected: Experience) -> None:
    assert ours.tensors().keys() == expected.tensors().keys()
    for name, value in expected.tensors().items():
        assert torch.equal(getattr(ours, name), value), name


def test_batches_hold_every_row_once_with_no_more_padding_than_they_need():
    buffer = NaiveExperienceBuffer(2)
    buffer.append(experience([3, 5, 2], width=9))
    buffer.append(experience([4, 7], start=3))
    assert len(buffer) == 5
    for batch, expected in zip(
        buffer.batches("cpu"),
        [experience([3, 5]), experience([2, 4], start=2), experience([7], start=4)],
        strict=True,
    ):
        assert_equal(batch, expected)


def test_an_order_is_kept_to():
    buffer = NaiveExperienceBuffer(2)
    buffer.append(experience([3, 5, 2]))
    assert [batch.reward.tolist() for batch in buffer.batches("cpu", order=[2, 0, 1])] == [[3.0, 1.0], [2.0]]


def test_the_oldest_rows_go_first():
    buffer = NaiveExperienceBuffer(4, limit=2)
    buffer.append(experience([3, 5, 2]))
    buffer.append(experience([4], start=3))
    assert_equal(next(buffer.batches("cpu")), experience([2, 4], start=2))


def test_a_state_is_taken_back():
    buffer, other = NaiveExperienceBuffer(4), NaiveExperienceBuffer(4)
    buffer.append(experience([3, 5, 2], reference=False))
    other.load_state(buffer.state())
    assert_equal(next(other.batches("cpu")), next(buffer.batches("cpu")))
    buffer.clear()
    other.load_state(buffer.state())
    assert len(buffer) == len(other) == 0 and list(other.batches("cpu")) == []


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="only some parts have"):
        Experience.cat([experience([2]), experience([2], reference=False)])
    with pytest.raises(ValueError, match="nothing to join"):
        Experience.cat([])
    with pytest.raises(ValueError, match=r"action_mask has the shape \(1, 3\), expected \(1, 2\)"):
        Experience(**{**experience([3]).tensors(), "action_mask": torch.ones(1, 3, dtype=torch.bool)})
    with pytest.raises(ValueError, match="sample_batch_size is 0"):
        NaiveExperienceBuffer(0)
    with pytest.raises(ValueError, match="limit is -1"):
        NaiveExperienceBuffer(1, limit=-1)
