"""The loss that does not make all logits equals the one that does, in value and in every gradient."""

import pytest
import torch
from tiny_models import tiny_model, token_batch

from coati_ext.models.lm_head import LanguageModelHead, LanguageModelLoss
from coati_ext.models.loss import GPTLMLoss


def batch():
    ids = token_batch(3, 9)
    labels = ids.clone()
    labels[0, :4], labels[1], labels[2, -1] = -100, -100, -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, labels


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("num_tokens", [None, 17.0])
@pytest.mark.parametrize(
    ("family", "settings", "plain"),
    [
        ("llama", {}, True),
        ("mixtral", {"tie_word_embeddings": True}, True),
        ("cohere2_moe", {"logit_scale": 0.3}, True),
        ("llama", {"logit_noise": 0.1}, False),  # a setting that is not known
    ],
)
def test_loss_and_gradients_equal_those_of_all_logits(family, settings, plain, num_tokens):
    model = tiny_model(family, **settings).train()
    head = LanguageModelHead(model)
    assert head.is_plain == plain
    inputs, labels = batch()
    expected = GPTLMLoss()(model(**inputs).logits, labels, num_tokens)
    expected.backward()
    wanted = gradients(model)
    model.zero_grad()

    calls = []
    model.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))
    loss = LanguageModelLoss(head)(inputs, labels, num_tokens)
    loss.backward()
    assert bool(calls) == (not plain)  # the head's module would make all logits
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-7)
    found = gradients(model)
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-4, atol=1e-7)


def test_a_batch_without_supervision_has_loss_0_and_gradients_of_0():
    model = tiny_model("llama")
    inputs, labels = batch()
    loss = LanguageModelLoss(LanguageModelHead(model))(inputs, labels.fill_(-100))
    loss.backward()
    assert loss == 0 and not any(gradient.any() for gradient in gradients(model).values())
