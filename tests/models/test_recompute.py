"""Gradient checkpointing: bit-equal gradients, and the routing of the forward in the recomputation."""

import pytest
import torch
from distributed import pool
from tiny_models import tiny_model, token_batch

from coati_ext.models.recompute import enable_recompute
from coati_ext.moe import MoeExperts
from coati_ext.moe.experts import shard_experts


def gradients(family: str, recompute: bool) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Gradients of all weights, and how often each experts layer was called and counted."""
    model = tiny_model(family)
    shard_experts(model)
    if recompute:
        enable_recompute(model)
    model.train()
    calls = {}
    for name, module in model.named_modules():
        if isinstance(module, MoeExperts):
            module.register_forward_pre_hook(lambda *_, name=name: calls.update({name: calls.get(name, 0) + 1}))
    ids = token_batch(2, 9)
    model(input_ids=ids, labels=ids).loss.backward()
    counted = [int(m.tokens_per_expert_E.sum()) for m in model.modules() if isinstance(m, MoeExperts)]
    assert all(count == ids.numel() * model.config.num_experts_per_tok for count in counted)
    return {name: p.grad for name, p in model.named_parameters()}, calls


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "llama"])
def test_gradients_are_bit_equal(family):
    (kept, calls), (again, twice) = gradients(family, False), gradients(family, True)
    assert all(torch.equal(kept[name], again[name]) for name in kept)
    assert twice == {name: 2 * count for name, count in calls.items()}  # it was recomputed


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_a_router_that_changes_its_mind_does_not_change_the_routing(family):
    model = tiny_model(family)
    shard_experts(model)
    enable_recompute(model)
    model.train()
    chosen: dict[int, list[torch.Tensor]] = {}
    for number, module in enumerate(model.modules()):
        if isinstance(module, MoeExperts):
            module.register_forward_pre_hook(lambda _, args, n=number: chosen.setdefault(n, []).append(args[1].clone()))
    ids = token_batch(2, 9)
    loss = model(input_ids=ids, labels=ids).loss
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("gate.weight"):
                p.neg_()  # would choose the experts that were last
    loss.backward()
    assert chosen and all(len(pair) == 2 and torch.equal(*pair) for pair in chosen.values())


def train_with_ep() -> list[bool]:
    from parity import run_layout

    plain, checkpointed = (run_layout("mixtral", ["all"], 2, 1, checkpointing=on)[2] for on in (False, True))
    return [torch.equal(plain[name], checkpointed[name]) for name in plain]


def test_it_is_bit_equal_under_expert_parallelism():
    assert all(all(equal) for equal in pool(2).run(train_with_ep))
