"""The benchmark of expert parallelism: its table and figures on two gloo ranks, and what it refuses."""

import json

import pytest
import torch

from applications import benchmark
from coati_ext.benchmark import ep, experts


def test_every_routing_is_measured_against_the_link(capfd):
    shape = experts.Shape(num_experts=4, hidden=64, intermediate=8, top_k=2)
    routings = list(experts.ROUTINGS)
    report = ep.compare({"tiny": shape}, [40], routings, backend="gloo", steps=5)
    assert json.loads(json.dumps(report))["ranks"] == 2
    assert [row["routing"] for row in report["rows"]] == routings
    printed = capfd.readouterr().out.splitlines()
    assert printed[1:] == [ep.HEADER, *(ep.Row(**row).line() for row in report["rows"])]
    for row in report["rows"]:
        ms = row["forward_ms"] + row["backward_ms"]
        assert min(row["forward_ms"], row["backward_ms"], row["link_ms"]) > 0
        assert row["of_link"] == pytest.approx(row["gb_per_s"] / row["link_gb_per_s"])
        assert row["gb_per_s"] * ms == pytest.approx(sent_mb(row["routing"], shape, 40), rel=0.5)  # medians of parts


def sent_mb(routing: str, shape: experts.Shape, num_tokens: int) -> float:
    """What a rank of two sends to the other in four exchanges, mean of both ranks."""
    rows = 0
    for rank in range(2):
        torch.manual_seed(rank)
        torch.randn(num_tokens, shape.hidden)
        torch.rand(num_tokens, shape.top_k)
        owner = experts.route(shape, num_tokens, routing, torch.device("cpu")) // (shape.num_experts // 2)
        rows += (owner != rank).sum().item()  # sent by it, and received by the other
    return 4 * rows / 2 * shape.hidden * 4 / 1e6


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--shapes", "gpt"], "--shapes: unknown gpt; there are deepseek_v3"),
        (["--routings", "even"], "--routings: unknown even"),
        (["--backend", "mpi"], "--backend: unknown mpi; there are nccl, gloo"),
        (["--tokens", "0"], "--tokens must be at least 1"),
        (["--steps", "4"], "--steps must be at least 5"),
        (["--ranks", "1"], "--ranks must be at least 2"),
        (["--ranks", "99"], "GPU(s) visible, 99 needed"),
        (["--backend", "gloo", "--ranks", "3"], "3 ranks do not divide the 256 experts of deepseek_v3"),
    ],
)
def test_wrong_flags_are_told_before_a_rank_is_started(flags, message, capsys):
    assert benchmark.main(["ep", *flags]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("visible", [0, 1])
def test_fewer_than_two_gpus_are_refused_by_name(visible, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert benchmark.main(["ep"]) == 1
    assert f"--backend nccl: {visible} GPU(s) visible, 2 needed" in capsys.readouterr().err
