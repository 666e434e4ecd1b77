"""Under pipelines and sequence parallelism too, the loss of a plain head is made without the logits of all tokens."""

import pytest
import torch
from distributed import pool
from parity import reference, run_layout

from coati_ext.models.loss import GPTLMLoss

LAYOUTS = {
    "pp 2": {"pp": 2, "microbatch_size": 2},
    "pp 2, packing": {"pp": 2, "packing": True},
    "pp 2, tied": {"pp": 2, "model_kwargs": {"tie_word_embeddings": True}},
    "sp 2": {"sp": 2},
}


def run_without_logits(settings: dict):
    def forbidden(*args, **kwargs):
        raise AssertionError("the loss was asked for of all logits")

    of_logits, GPTLMLoss.forward = GPTLMLoss.forward, forbidden
    try:
        return run_layout("mixtral", ["all"], 1, 2, **settings)
    finally:
        GPTLMLoss.forward = of_logits


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients_are_those_of_one_process(layout):
    settings = LAYOUTS[layout]
    losses, norms, grads = reference("mixtral", ["all"], num_used=None, model_kwargs=settings.get("model_kwargs"))
    for ours, ours_norms, ours_grads in pool(2).run(run_without_logits, settings):
        assert ours == pytest.approx(losses, rel=1e-6)
        assert ours_norms == pytest.approx(norms, rel=1e-5)
        for name, grad in grads.items():
            torch.testing.assert_close(ours_grads[name], grad, rtol=1e-4, atol=1e-6)


def run_of_scaled_logits():
    return run_layout("cohere2_moe", ["all"], 1, 2, pp=2, model_kwargs={"logit_scale": 0.3})


def test_a_head_that_does_more_than_its_weight_gets_all_logits():
    losses, _, grads = reference("cohere2_moe", ["all"], num_used=None, model_kwargs={"logit_scale": 0.3})
    for ours, _, ours_grads in pool(2).run(run_of_scaled_logits):
        assert ours == pytest.approx(losses, rel=1e-6)
        for name, grad in grads.items():
            torch.testing.assert_close(ours_grads[name], grad, rtol=1e-4, atol=1e-6)
