"""CUDA graphs of the decode step: the tokens of steps without graphs, and sooner."""

import time
from typing import Any

import pytest
import torch
from parity import lora_config, randomise_lora_B
from tiny_models import VOCAB, tiny_model, token_batch
from torch import nn

from coati_ext.models import decode_graph, fixed_cache
from coati_ext.models.decode_graph import StaticStep, can_capture
from coati_ext.models.generation import Completions, Sampling, generate
from coati_ext.models.lora import inject_lora
from coati_ext.moe.experts import MoeExperts

pytestmark = pytest.mark.gpu

LENGTHS = (3, 9, 5, 17, 1, 12, 8, 2)
PROMPTS = [token_batch(1, length, seed=number)[0].tolist() for number, length in enumerate(LENGTHS)]
STOPS = Sampling(max_new_tokens=90, stop_ids=tuple(range(0, VOCAB, 24)))  # at a random token after 24 in the mean


def small_model(num_layers: int = 4) -> nn.Module:
    """9 heads of which 3 share keys, as SmolLM2-135M; fp32."""
    sizes = dict(hidden_size=144, intermediate_size=96, num_attention_heads=9, num_key_value_heads=3)
    return tiny_model("llama", num_hidden_layers=num_layers, max_position_embeddings=512, **sizes).cuda()


def draw(model: nn.Module, graphs: bool | None, **kwargs: Any) -> Completions:
    sampling = kwargs.pop("sampling", STOPS)
    return generate(model, PROMPTS, sampling, cuda_graphs=graphs, **{"num_samples": 4, "seed": (4,), **kwargs})


def assert_same(found: Completions, expected: Completions) -> None:
    assert found.ids == expected.ids and found.finished == expected.finished
    for a, b in zip(found.log_probs, expected.log_probs, strict=True):
        assert a == pytest.approx(b, abs=1e-4)  # fp32 sums of other kernels


@pytest.fixture
def captures(monkeypatch) -> list[tuple[int, int]]:
    """Columns grow in steps of 16 and more; the shape of every graph."""
    shapes, captured = [], StaticStep._captured

    def note(self: StaticStep) -> torch.cuda.CUDAGraph:
        shapes.append((self.room.rows, self.room.columns))
        return captured(self)

    monkeypatch.setattr(StaticStep, "_captured", note)
    monkeypatch.setattr(fixed_cache, "LEAST_COLUMNS", 32)
    monkeypatch.setattr(fixed_cache, "COLUMN_MULTIPLE", 16)
    monkeypatch.setattr(fixed_cache, "LEAST_ROWS", 8)
    monkeypatch.setattr(decode_graph, "WORTH_SHRINKING", 16)
    return shapes


@pytest.mark.parametrize("batch_size", [None, 12])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_graphs_draw_what_steps_without_draw(captures, batch_size, attention):
    model = small_model()
    model.set_attn_implementation(attention)
    expected = draw(model, False, batch_size=batch_size)
    assert not captures
    assert_same(draw(model, True, batch_size=batch_size), expected)
    assert len({columns for _, columns in captures}) > 1 and len({rows for rows, _ in captures}) > (batch_size is None)


@pytest.mark.parametrize(
    "limits", [{"temperature": 0}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.7}, {"min_new_tokens": 30}]
)
def test_every_way_to_draw_is_captured(captures, limits):
    sampling = Sampling(max_new_tokens=40, stop_ids=tuple(range(0, 90, 9)), **limits)
    model = small_model()
    assert_same(draw(model, True, sampling=sampling), draw(model, False, sampling=sampling))
    assert captures


def test_weights_that_change_between_calls_are_those_that_draw(captures):
    model = small_model()
    inject_lora(model, lora_config(["all"]))
    model.eval()
    before = draw(model, True)
    randomise_lora_B(model)
    expected = draw(model, False)
    assert expected.ids != before.ids
    assert_same(draw(model, None), expected)


@pytest.mark.parametrize("when", ["in every step", "in captures"])
def test_waiting_for_the_device_is_said_once_and_nothing_is_drawn_twice(captures, capsys, when):
    def wait(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        if when == "in every step" or torch.cuda.is_current_stream_capturing():
            output.sum().item()

    model = small_model()
    expected = draw(model, False)
    model.model.layers[1].mlp.register_forward_hook(wait)
    assert_same(draw(model, None), expected)
    out = capsys.readouterr().out
    assert out.count("warning: generation goes on without CUDA graphs") == 1
    assert len(captures) == (when == "in captures")
    assert ("test_generation.py:" in out) == (when == "in every step")
    with pytest.raises(ValueError, match="no graph can be captured"):
        draw(model, True)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.cuda.empty_cache()  # fails while a capture is underway
    assert_same(draw(small_model(), True), expected)


def test_nothing_stays_allocated(captures):
    model = small_model()
    draw(model, True)  # what libraries keep
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    draw(model, True)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 2**20


def mixture(family: str, dtype: torch.dtype) -> nn.Module:
    model = tiny_model(family, max_position_embeddings=512).to("cuda", dtype)
    inject_lora(model, lora_config(["all"]))
    randomise_lora_B(model)
    return model.eval()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_draw_from_the_model_s_distribution(captures, family):
    """In bf16, the log-prob of each token against that of one forward over all of them, as they are without graphs."""
    model = mixture(family, torch.bfloat16)
    routed = [m.tokens_per_expert_E.clone() for m in model.modules() if isinstance(m, MoeExperts)]
    drawn = {graphs: draw(model, graphs) for graphs in (False, True)}
    after = [m.tokens_per_expert_E.clone() for m in model.modules() if isinstance(m, MoeExperts)]
    assert routed and all(torch.equal(a, b) for a, b in zip(routed, after, strict=True))
    errors = {graphs: log_prob_errors(model, drawn[graphs]) for graphs in drawn}
    assert captures and len(errors[True]) > 500
    assert errors[True].mean() < 1.2 * errors[False].mean() + 1e-3 < 0.2, {k: e.mean() for k, e in errors.items()}


@torch.no_grad()
def log_prob_errors(model: nn.Module, found: Completions) -> torch.Tensor:
    errors = []
    for number, (ids, log_probs) in enumerate(zip(found.ids, found.log_probs, strict=True)):
        prompt = PROMPTS[number // 4]
        logits = model(torch.tensor([prompt + ids], device="cuda"), use_cache=False).logits[0, len(prompt) - 1 : -1]
        exact = logits.float().log_softmax(-1).gather(1, torch.tensor(ids, device="cuda")[:, None])[:, 0]
        errors.append((exact.cpu() - torch.tensor(log_probs)).abs())
    return torch.cat(errors)


def test_experts_whose_products_wait_are_named():
    graphs, reason = can_capture(mixture("mixtral", torch.float32))
    assert not graphs and "experts in torch.float32" in reason
    assert can_capture(mixture("mixtral", torch.bfloat16)) == (True, "")
    assert "experts modules of transformers" in can_capture(tiny_model("mixtral").cuda())[1]
    assert can_capture(small_model()) == (True, "")


def test_graphs_are_faster():
    model, sampling, seconds = small_model(num_layers=12), Sampling(max_new_tokens=256, stop_ids=()), {}
    for graphs in (True, False, True, False):
        torch.cuda.synchronize()
        start = time.perf_counter()
        draw(model, graphs, sampling=sampling)
        torch.cuda.synchronize()
        seconds[graphs] = time.perf_counter() - start
    assert seconds[True] < seconds[False] / 2, seconds
