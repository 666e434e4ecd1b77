"""Steps of fixed shapes against steps over a growing cache, in fp32: the same tokens, in whatever shape of the room.

On a CPU the step of a CUDA graph runs as it is, without a graph. Tolerance of log-probs: 1e-5, as summing over masked
columns moves the last bits.
"""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import pool
from parity import lora_config, randomise_lora_B
from tiny_models import VOCAB, tiny_model, token_batch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from coati_ext.models import decode_graph, fixed_cache, generation
from coati_ext.models.decode_graph import StaticStep, can_capture
from coati_ext.models.fixed_cache import Room, fix_cache, release_cache
from coati_ext.models.generation import Completions, Sampling, generate
from coati_ext.models.kv_cache import adopt_cache, join_caches, select_rows
from coati_ext.models.lora import inject_lora
from coati_ext.models.tensor_parallel import shard_tensor_parallel
from coati_ext.moe.experts import shard_experts
from tests.models.test_generation import byte_tokenizer

LENGTHS = (3, 9, 5, 9, 1)
PROMPTS = [token_batch(1, length, seed=number)[0].tolist() for number, length in enumerate(LENGTHS)]
STOPS = Sampling(max_new_tokens=30, stop_ids=tuple(range(0, VOCAB, 12)))  # at a random token after 12 in the mean


def model_of(family: str) -> nn.Module:
    if family == "llama, eager":
        model = tiny_model("llama")
        model.set_attn_implementation("eager")
        return model
    if family == "llama, no groups":
        return tiny_model("llama", num_key_value_heads=4)
    if family in ("qwen2", "qwen3"):
        torch.manual_seed(0)
        sizes = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8)
        heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2)
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**sizes, **heads), dtype=torch.float32).eval()
    return tiny_model(family)


@pytest.fixture
def steps(monkeypatch) -> list[tuple[int, int]]:
    """Steps of fixed shapes as on a GPU, in a room of small shapes; the shape of every step."""
    shapes, step = [], StaticStep._step

    def note(self: StaticStep) -> None:
        shapes.append((self.room.rows, self.room.columns))
        step(self)

    monkeypatch.setattr(StaticStep, "_step", note)
    monkeypatch.setattr(generation, "can_capture", lambda model, group: (True, ""))
    monkeypatch.setattr(fixed_cache, "LEAST_COLUMNS", 8)
    monkeypatch.setattr(fixed_cache, "COLUMN_MULTIPLE", 4)
    monkeypatch.setattr(fixed_cache, "LEAST_ROWS", 2)
    monkeypatch.setattr(fixed_cache, "ROW_MULTIPLE", 2)
    monkeypatch.setattr(decode_graph, "WORTH_SHRINKING", 4)
    return shapes


def draw(model: nn.Module, graphs: bool | None, **kwargs: Any) -> Completions:
    prompts, sampling = kwargs.pop("prompts", PROMPTS), kwargs.pop("sampling", STOPS)
    return generate(model, prompts, sampling, cuda_graphs=graphs, **{"num_samples": 3, "seed": (4,), **kwargs})


def assert_same(found: Completions, expected: Completions) -> None:
    assert found.ids == expected.ids and found.finished == expected.finished
    for a, b in zip(found.log_probs, expected.log_probs, strict=True):
        assert a == pytest.approx(b, abs=1e-5)


# --- the same tokens


@pytest.mark.parametrize("family", ["llama", "llama, eager", "llama, no groups", "qwen2", "qwen3", "mixtral"])
@pytest.mark.parametrize("turns", [1, 5])
def test_draws_what_a_growing_cache_draws(steps, family, turns):
    model = model_of(family)
    sampling = Sampling(max_new_tokens=30, stop_ids=tuple(range(0, VOCAB, 32)))
    expected = draw(model, False, sampling=sampling)
    assert not steps
    assert_same(draw(model, True, sampling=sampling, turns_between_reads=turns), expected)
    assert {True, False} == set(expected.finished) and len(steps) == 29
    assert len({columns for _, columns in steps}) > 3  # over borders: 12, 16, 24, ... columns
    assert model.config._attn_implementation == ("eager" if "eager" in family else "sdpa")


def test_groups_of_heads_attend_without_copies_of_the_keys(steps, monkeypatch):
    monkeypatch.setattr(decode_graph, "sdpa_attention_forward", None)
    draw(tiny_model("llama"), True)
    assert steps


@pytest.mark.parametrize("batch_size", [3, 4, 7])
@pytest.mark.parametrize("turns", [1, 4])
def test_prompts_are_admitted_while_rows_step(steps, batch_size, turns, monkeypatch):
    model, joins, join = tiny_model("llama"), [], decode_graph.StaticStep.make_room

    def note(self: StaticStep, num_rows: int, width: int, last: int) -> None:
        joins.append(num_rows)
        join(self, num_rows, width, last)

    monkeypatch.setattr(StaticStep, "make_room", note)
    expected = draw(model, False)
    assert_same(draw(model, True, batch_size=batch_size, turns_between_reads=turns), expected)
    assert max(joins) > 3 or batch_size == 3  # rows of more than one prompt
    assert max(rows for rows, _ in steps) == batch_size + batch_size % 2


def test_ended_rows_leave_when_half_the_shape_is_enough(steps):
    model = tiny_model("llama")
    sampling = Sampling(max_new_tokens=40, stop_ids=tuple(range(0, VOCAB, 8)))
    assert_same(draw(model, True, sampling=sampling), draw(model, False, sampling=sampling))
    rows = list(dict.fromkeys(rows for rows, _ in steps))
    assert len(rows) > 2 and all(after <= before // 2 + 1 for before, after in pairwise(rows))


def test_rows_leave_for_others_that_wait(steps):
    """One prompt's rows end early; the others still step when those that waited come in."""
    model = tiny_model("llama")
    sampling = Sampling(max_new_tokens=40, stop_ids=tuple(range(0, VOCAB, 8)))
    kwargs = dict(sampling=sampling, num_samples=1, batch_size=4, prompts=PROMPTS * 3)
    assert_same(draw(model, True, **kwargs), draw(model, False, **kwargs))
    assert {rows for rows, _ in steps} <= {2, 4}


def test_an_adapter_steps_along(steps):
    model = tiny_model("llama")
    plain = draw(model, False)
    inject_lora(model, lora_config(["all"]))
    randomise_lora_B(model)
    expected = draw(model.eval(), False)
    assert_same(draw(model, True), expected)
    assert expected.ids != plain.ids


@pytest.mark.parametrize(
    "limits", [{"temperature": 0}, {"top_k": 5}, {"top_p": 0.8}, {"min_new_tokens": 9}, {"stop_strings": ("aa", "bcd")}]
)
def test_every_way_to_draw_and_to_end(steps, limits):
    model, sampling = tiny_model("llama"), Sampling(max_new_tokens=20, stop_ids=tuple(range(0, 90, 9)), **limits)
    kwargs = dict(sampling=sampling, tokenizer=byte_tokenizer(), turns_between_reads=3)
    assert_same(draw(model, True, **kwargs), draw(model, False, **kwargs))
    assert steps


def test_no_step_is_taken_past_the_last_end(steps):
    model = tiny_model("llama")
    sampling = Sampling(max_new_tokens=4, stop_ids=())
    assert_same(draw(model, True, sampling=sampling, turns_between_reads=50), draw(model, False, sampling=sampling))
    assert len(steps) == 3


def test_logits_that_are_not_finite_are_an_error(steps):
    model = tiny_model("llama")
    token = draw(model, False).ids[4][1]
    model.model.embed_tokens.weight.data[token] = torch.nan  # the third token of a completion of prompt 1
    with pytest.raises(ValueError, match=r"logits of prompt \d are not finite at token"):
        draw(model, True)


# --- the room


def filled(model: nn.Module, rows: torch.Tensor) -> DynamicCache:
    return adopt_cache(model(rows, use_cache=True).past_key_values, "model")


def tensors(cache: DynamicCache) -> list[torch.Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


@torch.no_grad()
def test_a_cache_in_a_room_is_cut_joined_and_released_as_a_growing_one():
    model, ids_BS = tiny_model("llama"), token_batch(5, 8)
    room = Room(device=torch.device("cpu"))
    ours, theirs = filled(model, ids_BS[:3]), filled(model, ids_BS[:3])

    def both(rows: int, width: int, change) -> None:
        room.reshape(rows, width, width + 9)
        buffers = dict(room.buffers)
        change(ours)
        change(theirs)
        for found, expected in zip(tensors(ours), tensors(theirs), strict=True):
            assert torch.equal(found, expected)
        assert ours.get_seq_length() == theirs.get_seq_length() == width
        assert all(room.buffers[key] is buffer for key, buffer in buffers.items())

    room.reshape(6, 8, 17)
    fix_cache(ours, room)
    both(4, 6, lambda cache: select_rows(cache, torch.tensor([2, 0, 2, 1]), drop=2))
    both(6, 8, lambda cache: join_caches([cache, filled(model, ids_BS[3:])]))
    both(6, 5, lambda cache: select_rows(cache, None, drop=3))  # onto itself
    both(1, 5, lambda cache: select_rows(cache, torch.tensor([5])))
    release_cache(ours)
    both(1, 6, lambda cache: model(ids_BS[:1, :1], past_key_values=cache, use_cache=True))


def test_addresses_change_only_when_there_is_no_room(monkeypatch):
    monkeypatch.setattr(fixed_cache, "LEAST_ROWS", 8)
    room = Room(device=torch.device("cpu"))
    assert room.reshape(60, 100, 2000) and (room.rows, room.columns) == (64, 512)
    assert not room.reshape(33, 511, 2000) and (room.rows, room.columns) == (64, 512)
    assert not room.reshape(32, 512, 2000) and (room.rows, room.columns) == (32, 768)
    assert not room.reshape(32, 800, 1010) and (room.rows, room.columns) == (32, 1024)
    assert room.reshape(32, 1024, 1100) and (room.rows, room.columns) == (32, 1152)
    assert not room.reshape(32, 100, 130) and (room.rows, room.columns) == (32, 192)
    assert not room.reshape(3, 100, 130) and (room.rows, room.columns) == (8, 192)
    assert not room.reshape(2, 100, 130) and (room.rows, room.columns) == (8, 192)


# --- where it cannot be


def test_a_step_that_fails_is_taken_without_graphs_and_said_once(steps, monkeypatch, capsys):
    model, step = tiny_model("llama"), StaticStep._step
    expected = draw(model, False)

    def fail(self: StaticStep) -> None:
        if len(steps) == 5:
            raise RuntimeError("no such kernel\nmore")
        step(self)

    monkeypatch.setattr(StaticStep, "_step", fail)
    assert_same(draw(model, None), expected)
    warning = "warning: generation goes on without CUDA graphs, none can be captured: no such kernel\n"
    assert capsys.readouterr().out == warning and len(steps) == 5
    steps.clear()
    with pytest.raises(ValueError, match="cuda_graphs=True, but no graph can be captured: no such kernel"):
        draw(model, True)


def test_after_a_capture_that_fails_nothing_is_drawn_twice(steps, monkeypatch, capsys):
    model, turn = tiny_model("llama"), StaticStep.turn

    def fail(self: StaticStep, batch: Any) -> None:
        turn(self, batch)
        if len(steps) == 5:
            try:
                raise RuntimeError("operation not permitted when stream is capturing")
            finally:
                raise RuntimeError("capture was invalidated")

    expected = draw(model, False)
    monkeypatch.setattr(StaticStep, "turn", fail)
    assert_same(draw(model, None), expected)
    assert capsys.readouterr().out.endswith("captured: operation not permitted when stream is capturing\n")


def test_a_model_on_a_cpu_is_refused():
    with pytest.raises(ValueError, match="cuda_graphs=True, but LlamaForCausalLM is not on one CUDA device"):
        draw(tiny_model("llama"), True)


def sharded() -> tuple[str, str]:
    model = tiny_model("llama")
    shard_tensor_parallel(model, dist.group.WORLD)
    experts = tiny_model("mixtral").bfloat16()
    shard_experts(experts, dist.group.WORLD)
    return can_capture(model)[1], can_capture(experts)[1]


@pytest.mark.parametrize(
    "family, change, reason",
    [
        ("mixtral", {}, "MixtralForCausalLM has experts modules of transformers"),
        (
            "exaone_moe",
            {"mlp_layer_types": ["dense"] * 3},
            "ExaoneMoeForCausalLM caches in a DynamicSliding",
        ),
        ("llama", {"attn_implementation": "flex_attention"}, "attn_implementation is 'flex_attention'"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rotary tables"),
    ],
)
def test_what_cannot_be_captured_is_named(family, change, reason):
    graphs, found = can_capture(tiny_model(family, **change))
    assert not graphs and reason in found


@pytest.mark.parametrize(
    "dtype, reason", [(torch.float32, "experts in torch.float32"), (torch.bfloat16, "is not on one CUDA device")]
)
def test_experts_with_adapters_can_be_captured_in_bf16(dtype, reason):
    model = tiny_model("mixtral").to(dtype)
    inject_lora(model, lora_config(["all"]))
    assert reason in can_capture(model)[1]


def test_ranks_that_call_the_model_together_and_slices_of_weights_are_named():
    assert can_capture(tiny_model("llama"), group=SimpleNamespace())[1].startswith("ranks of a group")
    assert (
        pool(2).run(sharded)
        == [("LlamaForCausalLM is under tensor parallelism", "MixtralForCausalLM is under expert parallelism")] * 2
    )


def test_parameters_that_are_no_plain_tensors_are_named():
    class Chunked(nn.Parameter):
        pass

    model = tiny_model("llama")
    model.lm_head.weight = Chunked(model.lm_head.weight.data)
    assert "no plain tensors" in can_capture(model)[1]
