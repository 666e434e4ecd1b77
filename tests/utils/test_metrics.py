"""What a run writes a step, read by strict parsers."""

import json
import math
import sys
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from coati_ext.utils.metrics import MetricsLogger


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null_and_in_no_curve(tmp_path, value):
    logger = MetricsLogger(tmp_path / "tensorboard", tmp_path / "metrics.jsonl", enabled=True)
    logger.log(1, {"loss": 2.0, "tokens_per_s": 3.0})
    logger.log(2, {"loss": value, "tokens_per_s": 4.0}, skipped="the loss is not finite")
    logger.close()
    first, second = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(first, parse_constant=refuse) == {"step": 1, "loss": 2.0, "tokens_per_s": 3.0}
    expected = {"step": 2, "loss": None, "tokens_per_s": 4.0, "skipped": "the loss is not finite"}
    assert json.loads(second, parse_constant=refuse) == expected
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1]
    assert [event.step for event in events.Scalars("tokens_per_s")] == [1, 2]


def test_weights_and_biases_gets_the_scalars_of_tensorboard(tmp_path, monkeypatch):
    calls = []

    class Run:
        def log(self, scalars, step):
            calls.append((step, scalars))

        def finish(self):
            calls.append("finish")

    def init(**settings):
        calls.append(settings)
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    logger = MetricsLogger(
        tmp_path / "tensorboard", tmp_path / "metrics.jsonl", enabled=True, wandb_settings={"lr": 1e-3}
    )
    logger.log(1, {"reward": 0.5, "kl": math.nan}, note="text")
    logger.close()
    assert calls[0]["config"] == {"lr": 1e-3}
    assert calls[1:] == [(1, {"reward": 0.5}), "finish"]
