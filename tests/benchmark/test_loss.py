"""The benchmark of head and loss: the engines compute one loss."""

import json

import pytest

from applications import benchmark
from coati_ext.benchmark import loss


def test_the_engines_find_the_same_loss():
    lines = []
    report = loss.compare({"tiny": (8, 50)}, [3, 7], ["ours", "logits"], steps=1, show=lines.append)
    assert len(report["rows"]) == 4 == len(lines) - 2 and not report["failed"]
    for ours, logits in zip(report["rows"][::2], report["rows"][1::2], strict=True):
        assert ours["loss"] == pytest.approx(logits["loss"], rel=1e-5)
        assert ours["num_tokens"] == logits["num_tokens"] and ours["ms"] > 0
    json.dumps(report)


@pytest.mark.parametrize("train_head", [False, True])
def test_the_head_is_trained_on_request(train_head, monkeypatch):
    trained, lines = [], []

    def engine(hidden, weight, labels):
        trained.append(weight.requires_grad)
        return loss._logits(hidden, weight, labels)

    monkeypatch.setitem(loss.ENGINES, "ours", engine)
    loss.compare({"tiny": (8, 50)}, [3], ["ours"], train_head=train_head, steps=1, show=lines.append)
    assert set(trained) == {train_head}
    assert ("a trained head" if train_head else "a frozen head") in lines[0]


def test_an_engine_that_fails_leaves_the_others_their_rows(monkeypatch):
    def broken(*inputs):
        raise RuntimeError("no such kernel. More of it")

    monkeypatch.setitem(loss.ENGINES, "logits", broken)
    report = loss.compare({"tiny": (8, 50)}, [3], ["logits", "ours"], steps=1, show=lambda line: None)
    assert [row["engine"] for row in report["rows"]] == ["ours"]
    assert report["failed"] == [{"engine": "logits", "shape": "tiny", "error": "RuntimeError: no such kernel"}]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--shapes", "gpt"], "--shapes: unknown gpt; there are deepseek_v3"),
        (["--engines", "our"], "--engines: unknown our"),
        (["--tokens", "0"], "--tokens must be at least 1"),
        (["--engines", "liger"], "--engines liger: liger-kernel is not installed"),
    ],
)
def test_wrong_flags_are_told(flags, message, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert benchmark.main(["loss", *flags]) == 1
    assert message in capsys.readouterr().err
