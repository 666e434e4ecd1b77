"""Which slices a rank keeps, what is said about them, and what is refused."""

import pytest
import torch
import torch.distributed as dist
from distributed import pool
from tiny_models import tiny_model
from torch import nn

from coati_ext.checkpoint_io.layout import Layout
from coati_ext.checkpoint_io.reshard import plan
from coati_ext.checkpoint_io.stream import TensorSpec
from coati_ext.models.collectives import share
from coati_ext.models.lora import adapters_disabled
from coati_ext.models.tensor_parallel import shard_tensor_parallel
from coati_ext.models.tensor_parallel_layers import TensorParallelLinear
from tests.models.parallel_models import assert_same, batch, joined, own_slice, prepare, whole_model


def local_parameters(family: str, meta: bool, kwargs: dict) -> dict[str, tuple]:
    with torch.device("meta" if meta else "cpu"):
        model = whole_model(family, **kwargs)
    whole = dict(model.state_dict()) if not meta else {}
    shard_tensor_parallel(model, dist.group.WORLD)
    for name, parameter in model.named_parameters():
        assert meta or torch.equal(parameter, own_slice(whole[name], parameter)), name
    cuts = {name: getattr(parameter, "tp_cut", None) for name, parameter in model.named_parameters()}
    return {name: (tuple(t.shape), t.device.type, cuts.get(name)) for name, t in model.state_dict().items()}


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen2_tied"])
def test_every_slice_is_the_one_of_the_reshard_table(family, tp):
    kwargs = {"num_key_value_heads": 4}
    model = whole_model(family, **kwargs)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    specs = {name: TensorSpec(name=name, dtype=torch.float32, shape=shape) for name, shape in shapes.items()}
    table = plan(model.config, specs, Layout(tp=tp))
    for rank, local in enumerate(pool(tp).run(local_parameters, family, False, kwargs)):
        pieces = {piece.name: piece for piece in table.pieces(rank)}
        assert set(pieces) == set(shapes)
        for name, piece in pieces.items():
            shape, _, cut = local[name]
            spans = [((0, size),) for size in shapes[name]]
            if cut is not None:
                spans[cut.dim] = ((cut.start, cut.stop),)
                assert cut.full == shapes[name][cut.dim]
            assert (piece.shape, piece.spans) == (shape, tuple(spans)), name


def test_meta_weights_are_cut_alike():
    real = pool(2).run(local_parameters, "qwen2_tied", False, {})
    meta = pool(2).run(local_parameters, "qwen2_tied", True, {})
    for with_data, without in zip(real, meta, strict=True):
        assert {k: (s, c) for k, (s, _, c) in with_data.items()} == {k: (s, c) for k, (s, _, c) in without.items()}
        assert {device for _, device, _ in without.values()} == {"meta"}


def tied_after_sharding() -> bool:
    model = whole_model("qwen2_tied")
    shard_tensor_parallel(model, dist.group.WORLD)
    before = model.lm_head.weight is model.model.embed_tokens.weight
    model.tie_weights()
    return before and model.lm_head.weight is model.model.embed_tokens.weight


def test_tied_embeddings_stay_tied():
    assert pool(2).run(tied_after_sharding) == [True, True]


def lora_as_injected() -> tuple[dict, str, int, int]:
    model = whole_model("llama")
    shard_tensor_parallel(model, dist.group.WORLD)
    prepare(model, lora=True)
    factors = {n: joined(p, p) for n, p in model.named_parameters() if p.requires_grad}
    return factors, model.lora_report.format(), model.lora_report.num_total, model.lora_report.num_trainable


def test_lora_starts_and_is_reported_as_on_one_process():
    model = prepare(whole_model("llama"), lora=True)
    expected = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    for factors, table, num_total, num_trainable in pool(2).run(lora_as_injected):
        assert factors.keys() == expected.keys()
        assert all(torch.equal(factors[name], expected[name]) for name in expected)
        assert table == model.lora_report.format()
        assert (num_total, num_trainable) == (model.lora_report.num_total, model.lora_report.num_trainable)


def logits_without_adapters() -> torch.Tensor:
    model = whole_model("llama")
    shard_tensor_parallel(model, dist.group.WORLD)
    prepare(model, lora=True)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.ones_(parameter)
    with adapters_disabled(model), torch.no_grad():
        return model(batch(7)["input_ids"]).logits


def test_without_adapters_it_is_the_base_model():
    with torch.no_grad():
        expected = whole_model("llama")(batch(7)["input_ids"]).logits
    for logits in pool(2).run(logits_without_adapters):
        assert_same(logits, expected, "logits")


# --- refusals


def refusal(family: str, sequence_parallel: bool, kwargs: dict) -> str:
    model = tiny_model(family, **kwargs) if family == "deepseek_v3" else whole_model(family, **kwargs)
    return refused(model, sequence_parallel)


def refused(model: nn.Module, sequence_parallel: bool = False) -> str:
    names = [type(module) for module in model.modules()]
    try:
        shard_tensor_parallel(model, dist.group.WORLD, sequence_parallel=sequence_parallel)
    except ValueError as error:
        assert names == [type(module) for module in model.modules()], "changed before it was refused"
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    "family, sequence_parallel, kwargs, message",
    [
        ("llama", False, {}, "tp=4 does not divide num_key_value_heads=2 of 'llama'"),
        (
            "llama",
            False,
            {"num_key_value_heads": 4, "intermediate_size": 50},
            "tp=4 does not divide dimension 0 of layers.0.mlp.gate_proj.weight, of shape [50, 32]",
        ),
        ("llama", False, {"num_key_value_heads": 4, "vocab_size": 3}, "a rank without a row of a vocabulary of 3"),
        ("gpt2", False, {}, "transformers has no base_model_tp_plan for 'gpt2'"),
        ("deepseek_v3", False, {}, "model.layers.1.mlp.experts: tensor parallelism of routed experts is not built"),
        ("deepseek_v3", True, {"first_k_dense_replace": 3}, "plan does not cut all of layers.0.self_attn"),
        (
            "cohere",
            False,
            {"num_key_value_heads": 4, "use_qk_norm": True},
            "layers.0.self_attn.q_norm.weight: the base_model_tp_plan does not say how tp shares it",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(family, sequence_parallel, kwargs, message):
    for answer in pool(4).run(refusal, family, sequence_parallel, kwargs):
        assert message in answer


def other_refusals() -> list[str]:
    unknown = whole_model("llama")
    unknown.config.base_model_tp_plan = {"layers.*.mlp.up_proj": "diagonal"}
    no_linear = whole_model("llama")
    no_linear.model.layers[1].mlp.up_proj = nn.Bilinear(2, 2, 2)
    adapted = prepare(whole_model("llama"), lora=True)
    twice = whole_model("llama")
    shard_tensor_parallel(twice, dist.group.WORLD)
    return [refused(model) for model in (unknown, no_linear, adapted, twice)]


def test_unknown_styles_other_layers_and_models_at_work_are_refused_by_name():
    for unknown, no_linear, adapted, twice in pool(2).run(other_refusals):
        assert "layers.0.mlp.up_proj is to be shared as 'diagonal'; supported are ['colwise'" in unknown
        assert "layers.1.mlp.up_proj is a Bilinear" in no_linear
        assert "comes once, before LoRA; model.layers.0.self_attn.q_proj is a Linear" in adapted
        assert "comes once, before LoRA; model.embed_tokens is a VocabParallelEmbedding" in twice


def one_rank() -> bool:
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    model = whole_model("llama")
    shard_tensor_parallel(model, group, sequence_parallel=True)
    return any(isinstance(module, TensorParallelLinear) for module in model.modules())


def test_one_rank_leaves_the_model_as_it_is():
    assert pool(2).run(one_rank) == [False, False]


@pytest.mark.parametrize("size, parts", [(0, 3), (1, 4), (5, 4), (8, 4), (97, 4)])
def test_shares_are_a_partition(size, parts):
    shares = [share(size, parts, index) for index in range(parts)]
    assert [i for start, stop in shares for i in range(start, stop)] == list(range(size))
