"""The benchmark of the experts' block: every engine runs on the same work, and computes the same where it can."""

import json

import pytest
import torch

from applications import benchmark
from coati_ext.benchmark import experts

TINY = experts.Shape(num_experts=4, hidden=16, intermediate=8, top_k=2)


def test_every_engine_is_measured_on_every_shape_and_routing():
    lines = []
    report = experts.compare(
        {"tiny": TINY}, [5], list(experts.ROUTINGS), list(experts.ENGINES), rank=2, steps=1, show=lines.append
    )
    assert len(report["rows"]) == len(experts.ROUTINGS) * len(experts.ENGINES) == len(lines) - 2
    assert not report["failed"] and all(row["ms"] > 0 and row["tflops"] > 0 for row in report["rows"])
    json.dumps(report)


def test_without_their_adapters_the_engines_compute_the_same():
    device = torch.device("cpu")
    torch.manual_seed(0)
    frozen = experts._frozen(TINY, 2, device)
    ours, loop = experts._ours(TINY, 2, device), experts._Loop(TINY, 2, device)
    for number, expert in enumerate(loop.experts):
        for name in ("gate_proj", "up_proj", "down_proj"):
            for factor in ("lora_A", "lora_B"):
                torch.nn.init.zeros_(getattr(getattr(expert, name), factor)["default"].weight)
        gate, up = frozen.gate_up_proj[number].chunk(2)
        for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", frozen.down_proj[number])):
            getattr(expert, name).base_layer.weight.data = weight.data
    ours.gate_up_proj.data, ours.down_proj.data = frozen.gate_up_proj.data.clone(), frozen.down_proj.data.clone()
    ours.adapters_enabled = False
    hidden, weights = torch.randn(7, 16), torch.rand(7, 2)
    index = experts.route(TINY, 7, "uniform", device)
    expected = frozen(hidden, index, weights)
    torch.testing.assert_close(ours(hidden, index, weights), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loop(hidden, index, weights), expected, rtol=1e-4, atol=1e-5)


def test_weights_in_fp8_are_those_in_bf16_but_for_their_rounding():
    device = torch.device("cpu")
    shape = experts.Shape(num_experts=2, hidden=136, intermediate=72, top_k=1)  # whose blocks are ragged
    blocks = []
    for engine in ("ours", "ours_fp8"):
        torch.manual_seed(0)
        blocks.append(experts.ENGINES[engine](shape, 2, device))
    hidden, weights = torch.randn(7, 136), torch.rand(7, 1)
    index = experts.route(shape, 7, "uniform", device)
    ours, fp8 = (block(hidden, index, weights) for block in blocks)
    assert 0 < (fp8 - ours).norm() / ours.norm() < 0.08  # e4m3 has 4 bits


def test_routings_are_what_they_say():
    shape = experts.Shape(num_experts=8, hidden=1, intermediate=1, top_k=2)
    counts = {
        routing: torch.bincount(experts.route(shape, 400, routing, torch.device("cpu")).flatten(), minlength=8)
        for routing in experts.ROUTINGS
    }
    assert set(counts["balanced"].tolist()) == {100} and counts["single"].tolist() == [800, *[0] * 7]
    assert counts["uniform"].max() < 150 < counts["skewed"].max()
    assert all(count.sum() == 800 for count in counts.values())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--shapes", "gpt"], "--shapes: unknown gpt; there are deepseek_v3"),
        (["--engines", "our"], "--engines: unknown our"),
        (["--routings", "even"], "--routings: unknown even"),
        (["--tokens", "0"], "--tokens must be at least 1"),
        (["--rank", "0"], "--rank must be at least 1"),
    ],
)
def test_wrong_flags_are_told(flags, message, capsys):
    assert benchmark.main(["experts", *flags]) == 1
    assert message in capsys.readouterr().err
