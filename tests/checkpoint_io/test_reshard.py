import itertools
import math
import random
from collections import defaultdict
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from colossalai.cluster import ProcessGroupMesh
from colossalai.pipeline.stage_manager import PipelineStageManager
from tiny_models import mixtral_config, qwen3_moe_config, tiny_model
from transformers import DeepseekV3Config, LlamaConfig

from coati_ext.benchmark.synthetic import deepseek_v3_tensors
from coati_ext.checkpoint_io.layout import Coordinates, Layout, distribute_layers
from coati_ext.checkpoint_io.reshard import Plan, plan
from coati_ext.checkpoint_io.safetensors_file import num_bytes
from coati_ext.checkpoint_io.stream import TensorSpec

V3 = DeepseekV3Config(
    tie_word_embeddings=False, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}
)
V3_FILE_BYTES = 688_586_727_753  # of the 163 published shards, headers included
V3_LAYOUTS = [
    dict(pp=8, ep=32, dp=128),
    dict(pp=16, ep=64),
    dict(pp=8, tp=2, ep=64),
    dict(ep=256, dp=1024),
]


def table(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.bfloat16) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name=name, dtype=dtype, shape=shape) for name, shape in shapes.items()}


@cache
def published_tensors() -> dict[str, TensorSpec]:
    """Of DeepSeek-V3, multi-token prediction (layer 61) included."""
    return deepseek_v3_tensors(V3)


def holders(p: Plan) -> dict[str, dict[tuple, list[int]]]:
    """name -> the slices of it that are held -> the ranks that hold them, by asking every rank."""
    ranks = defaultdict(list)
    for rank in range(p.layout.world_size):
        for part in p.parts_of(rank):
            ranks[part].append(rank)
    found = defaultdict(lambda: defaultdict(list))
    for part, those in ranks.items():
        for piece in p.pieces_of(part):
            found[piece.name][piece.spans] += those
    return found


def overlap(a: tuple, b: tuple) -> bool:
    """Whether two products of spans share an element."""
    return all(any(s < v and u < e for s, e in x for u, v in y) for x, y in zip(a, b, strict=True))


def volume(spans: tuple) -> int:
    return math.prod(sum(stop - start for start, stop in dim) for dim in spans)


def check_partition(p: Plan, samples: int) -> None:
    """The different slices of every tensor are all of it, without overlap, and equally many ranks hold each; `owners`
    of random elements are the ranks whose slices hold them."""
    found = holders(p)
    assert set(found) == set(p.tensors)
    for name, slices in found.items():
        shape = p.tensors[name].shape
        assert sum(map(volume, slices)) == math.prod(shape), name
        assert not any(overlap(a, b) for a, b in itertools.combinations(slices, 2)), name
        assert len({len(ranks) for ranks in slices.values()}) == 1, name
        assert all(0 <= s < e <= n for spans in slices for dim, n in zip(spans, shape, strict=True) for s, e in dim)
    generator = random.Random(0)
    for name in generator.sample(sorted(p.tensors), min(samples, len(p.tensors))):
        index = tuple(generator.randrange(size) for size in p.tensors[name].shape)
        point = tuple(((i, i + 1),) for i in index)
        expected = sorted(rank for spans, ranks in found[name].items() if overlap(spans, point) for rank in ranks)
        assert p.owners(name, index) == expected, (name, index)


def bytes_of_ranks(p: Plan) -> list[int]:
    """What each rank holds."""
    of_part = {
        part: sum(num_bytes(p.tensors[piece.name].dtype, piece.shape) for piece in p.pieces_of(part))
        for part in p.parts
    }
    return [sum(of_part[part] for part in p.parts_of(rank)) for rank in range(p.layout.world_size)]


def slices_of(p: Plan, rank: int) -> dict[str, tuple]:
    return {piece.name: piece.spans for piece in p.pieces(rank)}


def test_the_671b_table_is_the_published_one():
    tensors = published_tensors()
    sizes = {name: math.prod(t.shape) for name, t in tensors.items() if not name.endswith("_scale_inv")}
    without_mtp = sum(size for name, size in sizes.items() if not name.startswith("model.layers.61."))
    assert round(without_mtp / 1e9) == 671
    header_bytes = V3_FILE_BYTES - sum(num_bytes(t.dtype, t.shape) for t in tensors.values())
    assert 110 < header_bytes / len(tensors) < 150  # name, dtype, shape and offsets as JSON


@pytest.mark.parametrize("sizes", V3_LAYOUTS, ids=str)
def test_1024_ranks_share_671b(sizes):
    p = plan(V3, published_tensors(), Layout(**sizes))
    assert p.layout.world_size == 1024
    check_partition(p, samples=400)
    of_stage = defaultdict(set)
    for rank, nbytes in enumerate(bytes_of_ranks(p)):
        of_stage[p.layout.coordinates(rank).pp].add(nbytes)
    assert all(len(different) == 1 for different in of_stage.values())  # alike within a stage


@pytest.mark.parametrize(
    "sizes, bound",
    [
        (dict(ep=256), 1.001),
        (dict(pp=8, ep=32), 1.35),  # an embedding and a head weigh as much as 3 layers on 32 ranks
        (dict(pp=8, ep=32, num_layers_per_stage=(5, 9, 8, 9, 8, 9, 8, 5)), 1.08),
    ],
)
def test_what_training_holds_of_671b_is_balanced(sizes, bound):
    tensors = {name: spec for name, spec in published_tensors().items() if not name.startswith("model.layers.61.")}
    nbytes = bytes_of_ranks(plan(V3, tensors, Layout(**sizes)))
    assert max(nbytes) < bound * sum(nbytes) / len(nbytes)


@pytest.mark.parametrize("sizes", [dict(), dict(ep=4), dict(pp=2, tp=2, ep=2, dp=4), dict(pp=3, tp=4)], ids=str)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_stacked_experts_are_shared_without_gap_or_overlap(family, tied, sizes):
    heads = dict(num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=3, tie_word_embeddings=tied)
    model = tiny_model(family, **heads)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    p = plan(model.config, table(shapes), Layout(**sizes))
    check_partition(p, samples=1000)


@pytest.mark.parametrize("num_stages", range(1, 17))
def test_layers_are_distributed_as_in_colossalai(num_stages):
    manager = SimpleNamespace(num_layers_per_stage=None, num_stages=num_stages, num_model_chunks=1)
    for num_layers in range(num_stages, 70):
        expected = PipelineStageManager.distribute_layers(manager, num_layers)
        assert list(distribute_layers(num_layers, num_stages)) == expected


def test_ranks_lie_on_the_mesh_as_in_colossalai():
    layout = Layout(ep=3, pp=2, tp=5, dp=12)
    for rank in range(layout.world_size):
        place = layout.coordinates(rank)
        assert place == ProcessGroupMesh.unravel(rank, (4, 2, 3, 5))
        assert layout.rank(place) == rank
    assert place == Coordinates(moe_dp=3, pp=1, ep=2, tp=4)


SMALL = dict(hidden_size=32, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, vocab_size=100)


def small_tensors(num_layers: int = 5) -> dict[str, TensorSpec]:
    shapes = {"model.embed_tokens.weight": (100, 32), "model.norm.weight": (32,), "lm_head.weight": (100, 32)}
    shapes |= {f"model.layers.{i}.self_attn.q_proj.weight": (32, 32) for i in range(num_layers)}
    return table(shapes)


def test_modules_are_on_their_stages():
    tensors = small_tensors(6) | table({"mtp.fc.weight": (32, 64)})  # the config has 5 layers: the 6th is for MTP
    config = LlamaConfig(**SMALL, num_hidden_layers=5)
    p = plan(config, tensors, Layout(pp=3))
    held = [sorted(slices_of(p, rank)) for rank in range(3)]
    layer = "model.layers.{}.self_attn.q_proj.weight".format
    assert held[0] == ["model.embed_tokens.weight", layer(0), layer(1)]
    assert held[1] == [layer(2), layer(3)]
    assert held[2] == ["lm_head.weight", layer(4), layer(5), "model.norm.weight", "mtp.fc.weight"]
    p = plan(config, tensors, Layout(pp=3, num_layers_per_stage=(1, 1, 3)))
    assert sorted(slices_of(p, 1)) == [layer(1)]


def test_a_tied_embedding_is_on_the_last_stage_too():
    config = LlamaConfig(**SMALL, num_hidden_layers=5, tie_word_embeddings=True)
    p = plan(config, small_tensors(), Layout(pp=3))
    assert [rank for rank in range(3) if "model.embed_tokens.weight" in slices_of(p, rank)] == [0, 2]
    assert p.owners("model.embed_tokens.weight", (7, 0)) == [0, 2]


def test_a_class_that_transformers_does_not_know_has_stages_and_experts():
    """Kimi-K2 and others come with code of their own. No lm_head means a tied embedding."""
    tensors = small_tensors()
    del tensors["lm_head.weight"]
    tensors |= table({f"model.layers.4.mlp.experts.{i}.up_proj.weight": (24, 32) for i in range(4)})
    config = {"model_type": "of_its_own", "num_hidden_layers": 5, "n_routed_experts": 4}
    p = plan(config, tensors, Layout(pp=2, ep=2))
    assert [rank for rank in range(4) if "model.embed_tokens.weight" in slices_of(p, rank)] == [0, 1, 2, 3]
    assert [p.owners(f"model.layers.4.mlp.experts.{i}.up_proj.weight", (0, 0)) for i in range(4)] == [
        [2],
        [2],
        [3],
        [3],
    ]


def test_each_ep_rank_has_a_contiguous_chunk_of_experts_in_both_forms():
    config = qwen3_moe_config()
    experts = "model.layers.0.mlp.experts"
    single = {f"{experts}.{i}.down_proj.weight": (32, 24) for i in range(8)}
    p = plan(config, table({**single, f"{experts}.gate_up_proj": (8, 48, 32)}), Layout(ep=4))
    for rank in range(4):
        stacked = slices_of(p, rank).pop(f"{experts}.gate_up_proj")
        assert stacked[0] == ((2 * rank, 2 * rank + 2),)
        assert {name for name in slices_of(p, rank) if name in single} == {
            f"{experts}.{i}.down_proj.weight" for i in (2 * rank, 2 * rank + 1)
        }


def test_tp_cuts_rows_columns_and_fused_halves():
    config = mixtral_config(vocab_size=99)
    tensors = table({
        "model.embed_tokens.weight": (99, 32),
        "model.layers.0.self_attn.q_proj.weight": (32, 32),
        "model.layers.0.self_attn.q_proj.bias": (32,),
        "model.layers.0.self_attn.o_proj.weight": (32, 32),
        "model.layers.0.self_attn.o_proj.bias": (32,),
        "model.layers.0.input_layernorm.weight": (32,),
        "model.layers.0.block_sparse_moe.gate.weight": (4, 32),
        "model.layers.0.block_sparse_moe.experts.1.w1.weight": (24, 32),
        "model.layers.0.block_sparse_moe.experts.1.w2.weight": (32, 24),
        "model.layers.1.mlp.experts.gate_up_proj": (4, 48, 32),
        "model.layers.1.mlp.experts.down_proj": (4, 32, 24),
    })  # fmt: skip
    half, whole = ((16, 32),), ((0, 32),)
    assert slices_of(plan(config, tensors, Layout(tp=2)), 1) == {
        "model.embed_tokens.weight": (((50, 99),), whole),
        "model.layers.0.self_attn.q_proj.weight": (half, whole),
        "model.layers.0.self_attn.q_proj.bias": (half,),
        "model.layers.0.self_attn.o_proj.weight": (whole, half),
        "model.layers.0.self_attn.o_proj.bias": (whole,),
        "model.layers.0.input_layernorm.weight": (whole,),
        "model.layers.0.block_sparse_moe.gate.weight": (((0, 4),), whole),
        "model.layers.0.block_sparse_moe.experts.1.w1.weight": (((12, 24),), whole),
        "model.layers.0.block_sparse_moe.experts.1.w2.weight": (whole, ((12, 24),)),
        "model.layers.1.mlp.experts.gate_up_proj": (((0, 4),), ((12, 24), (36, 48)), whole),
        "model.layers.1.mlp.experts.down_proj": (((0, 4),), whole, ((12, 24),)),
    }


def test_scales_are_cut_as_their_weight():
    down = "model.layers.5.mlp.shared_experts.down_proj.weight"
    p = plan(V3, published_tensors(), Layout(tp=4))
    held = slices_of(p, 2)
    assert held[down] == (((0, 7168),), ((1024, 1536),))
    assert held[down + "_scale_inv"] == (((0, 56),), ((8, 12),))
    assert held["model.layers.5.self_attn.kv_a_proj_with_mqa.weight_scale_inv"] == (((0, 5),), ((0, 56),))


REFUSED = {
    "ep does not divide dp": (dict(ep=4, dp=6), {}, "ep=4 must divide dp=6"),
    "zero": (dict(pp=0), {}, "pp must be a positive integer, got 0"),
    "not a number": (dict(tp="2"), {}, "tp must be a positive integer, got '2'"),
    "other stages": (dict(pp=2, num_layers_per_stage=[3]), {}, "must be a list of pp=2 numbers, got [3]"),
    "other layers": (dict(pp=2, num_layers_per_stage=[3, 3]), {}, "sums to 6, but the model has 2"),
    "more stages than layers": (dict(pp=3), {}, "pp=3 leaves stages without a layer"),
    "more ranks than experts": (dict(ep=16), {}, "ep=16 does not divide the 8 experts"),
    "tp of heads": (dict(tp=4), {}, "tp=4 does not divide num_key_value_heads=2"),
    "tp of rows": (dict(tp=2), {"model.layers.0.mlp.gate_proj.weight": (7, 4)}, "dimension 0 of model.layers.0.mlp"),
    "tp of few rows": (dict(tp=2), {"lm_head.weight": (1, 4)}, "without a row of lm_head.weight"),
    "quantised otherwise": (dict(tp=2), {"model.layers.0.mlp.up_proj.qweight": (8, 8)}, "up_proj.qweight"),
    "unknown place": (dict(), {"vision_tower.layers.0.weight": (8,)}, "vision_tower.layers.0.weight"),
    "unknown experts": (dict(), {"model.layers.0.mlp.experts.w13": (8, 4)}, "mlp.experts.w13"),
    "expert past the last": (dict(), {"model.layers.0.mlp.experts.8.up_proj.weight": (4, 4)}, "experts.8"),
    "other stack": (dict(), {"model.layers.0.mlp.experts.down_proj": (4, 4, 4)}, "expected the 8 experts in front"),
    "scale alone": (dict(), {"model.layers.0.mlp.up_proj.weight_scale_inv": (1, 1)}, "has no weight"),
}


@pytest.mark.parametrize("sizes, shapes, message", REFUSED.values(), ids=REFUSED)
def test_is_refused_by_name(sizes, shapes, message):
    with pytest.raises(ValueError) as error:
        plan(qwen3_moe_config().to_dict(), table(shapes), Layout(**sizes))
    assert message in str(error.value)


def test_a_dense_model_has_no_expert_parallelism():
    with pytest.raises(ValueError, match="ep=2 does not divide the 0 experts of 'llama'"):
        plan(LlamaConfig(), {}, Layout(ep=2))


def test_tp_needs_a_plan_of_transformers():
    with pytest.raises(ValueError, match="no base_model_tp_plan for 'of_its_own'"):
        plan({"model_type": "of_its_own", "num_hidden_layers": 5}, {}, Layout(tp=2))


def test_a_cut_within_an_fp8_block_is_refused():
    with pytest.raises(ValueError, match=r"gate_proj.weight, of shape \[18432, 7168\], every 576 .* blocks of 128"):
        plan(V3, published_tensors(), Layout(tp=32))


def test_a_broken_config_is_a_value_error():
    with pytest.raises(ValueError, match=r"'mixtral'.*num_hidden_layers"):
        plan({"model_type": "mixtral", "num_hidden_layers": "two"}, {}, Layout())
