"""Gradient checkpointing: bit-equal gradients, and the routing of the forward in the recomputation."""

import pytest
import torch
from distributed import pool
from tiny_models import CONFIGS, tiny_model, token_batch
from torch.utils._python_dispatch import TorchDispatchMode

from coati_ext.models.recompute import _KeepChoices, _RepeatChoices, enable_recompute
from coati_ext.models.targets import structure_of
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


# All whose layers call `topk` and are experts layers to us; jamba's block routes in its own forward.
CHOOSING = [name for name in CONFIGS if name not in ("llama", "gpt_oss", "nemotron_h", "longcat_flash", "phimoe")]


@pytest.mark.parametrize("family", CHOOSING)
def test_every_choice_of_a_layer_is_repeated_and_little_else_is_watched(family, monkeypatch):
    """`topk` in the layers happens where the mode is on, and attention's and the experts' products where it is off."""
    model = tiny_model(family)
    enable_recompute(model)
    enable_recompute(model)  # a second call adds no second mode
    model.train()
    watched: dict[type, list[str]] = {_KeepChoices: [], _RepeatChoices: []}
    for mode, names in watched.items():
        own = mode.__torch_dispatch__

        def dispatch(self, function, types, args=(), kwargs=None, own=own, names=names):
            names.append(str(function))
            return own(self, function, types, args, kwargs)

        monkeypatch.setattr(mode, "__torch_dispatch__", dispatch)
    ids = token_batch(2, 9)
    with CountTopk() as everywhere:
        model(input_ids=ids, labels=ids).loss.backward()
    kept, repeated = (names.count("aten.topk.default") for names in watched.values())
    assert kept == repeated > 0
    assert everywhere.count == kept  # the recomputation gathers instead of choosing
    products = sum(name in ("aten.mm.default", "aten.addmm.default") for name in watched[_KeepChoices])
    num_routers = sum(c.projection == "up_proj" for c in structure_of(model).candidates)
    num_indexers = sum(name.endswith(".indexer") for name, _ in model.named_modules())
    if family != "jamba":
        assert products <= num_routers + 3 * num_indexers


class CountTopk(TorchDispatchMode):
    def __enter__(self):
        self.count = 0
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten.topk.default
        return function(*args, **(kwargs or {}))
