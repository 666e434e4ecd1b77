import math

import pytest
import torch
from distributed import pool
from safetensors.torch import load_file
from tiny_models import tiny_model, token_batch

from coati_ext.trainer.sft import cosine_with_warmup, num_optimizer_steps


@pytest.mark.parametrize(
    ("num_batches", "epochs", "accumulation", "max_steps", "steps"),
    [(1, 1, 8, None, 1), (10, 1, 3, None, 4), (10, 2, 5, None, 4), (10, 2, 5, 3, 3), (1, 1, 1, 9, 1)],
)
def test_no_micro_batch_is_left_over(num_batches, epochs, accumulation, max_steps, steps):
    assert num_optimizer_steps(num_batches, epochs, accumulation, max_steps) == steps


def test_schedule_starts_above_zero_peaks_at_one_and_ends_at_the_floor():
    factor = cosine_with_warmup(20, 4)
    values = [factor(step) for step in range(20)]
    assert values[0] > 0 and max(values) == 1.0 and values[4] == 1.0
    assert values[:5] == sorted(values[:5]) and values[4:] == sorted(values[4:], reverse=True)
    assert values[-1] == pytest.approx(0.1)
    assert cosine_with_warmup(1, 1)(0) > 0


def fit_tiny(
    steps_per_epoch: int, accumulation_steps: int, num_epochs: int, poison: str | None, directory: str, pp: int = 1
):
    from coati_ext import compat

    compat.apply()  # before Booster is imported
    from colossalai.booster import Booster
    from peft import LoraConfig

    from coati_ext.plugin import MoeLoraPlugin
    from coati_ext.trainer.sft import SFTTrainer
    from coati_ext.utils.metrics import MetricsLogger

    plugin = MoeLoraPlugin(ep_size=2 // pp, pp_size=pp, max_norm=1.0)
    booster = Booster(plugin=plugin)
    model = booster.enable_lora(tiny_model("mixtral"), lora_config=LoraConfig(r=4, target_modules=["mlp"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine_with_warmup(8, 1))
    inner = model
    model, optimizer, *_ = booster.boost(model, optimizer, lr_scheduler=schedule)
    if poison == "weight" and torch.distributed.get_rank() == pp - 1:
        inner.model.norm.weight.data[0] = math.nan
    if poison and poison.startswith("gradient"):
        overflow_once(inner)
    ids = token_batch(2, 9)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    trainer = SFTTrainer(
        booster=booster,
        model=model,
        optimizer=optimizer,
        lr_scheduler=schedule,
        dataloader=[batch] * steps_per_epoch,
        dp_group=plugin.dp_group,
        pp_group=plugin.pp_group if pp > 1 else None,
        num_epochs=num_epochs,
        accumulation_steps=accumulation_steps,
        save_dir=directory,
        skip_nonfinite=poison == "gradient, skipped",
    )
    main = torch.distributed.get_rank() == 0
    logger = MetricsLogger(f"{directory}/tensorboard", f"{directory}/metrics.jsonl", enabled=main)
    try:
        losses = trainer.fit(logger, show_progress=False)
    except ValueError as error:
        return str(error)
    finally:
        logger.close()
    return losses


def test_in_a_pipeline_the_stage_that_is_not_finite_is_named(tmp_path):
    first, second = pool(2).run(fit_tiny, 2, 1, 1, "weight", str(tmp_path), 2)
    assert first == second and "On rank 1 the first output that is not finite is that of model.norm" in first


def overflow_once(model) -> None:
    """An infinite gradient in the second step, on rank 1 alone; also when it is done again."""
    weight = next(p for n, p in model.named_parameters() if "lora_B" in n)
    calls = []

    def hook(grad):
        calls.append(None)
        return grad * math.inf if len(calls) in (2, 3) and torch.distributed.get_rank() == 1 else grad

    weight.register_hook(hook)


def test_an_infinite_gradient_stops_every_rank_before_the_update(tmp_path):
    first, second = pool(2).run(fit_tiny, 3, 1, 1, "gradient", str(tmp_path))
    assert first == second and first.startswith("step 2: the loss is ")
    assert "the gradient norm is" in first and "On rank 1 gradients are not finite" in first
    assert "lora_B" in first and (tmp_path / "nonfinite" / "step-00000002-rank-00001.safetensors").exists()


def test_a_step_that_is_not_finite_can_be_left_out_and_counted(tmp_path):
    import json

    losses, _ = pool(2).run(fit_tiny, 4, 1, 1, "gradient, skipped", str(tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 4 and all(math.isfinite(loss) for loss in losses)
    assert ["skipped" in row for row in rows] == [False, True, False, False]
    assert "gradients are not finite" in rows[1]["skipped"] and "grad_norm" not in rows[1]
    assert rows[2]["learning_rate"] == rows[1]["learning_rate"]  # the schedule waits as well
    assert losses[2] == losses[1] > losses[3]  # the same batch again, on the same weights


def test_the_loss_falls_and_every_step_is_logged_once(tmp_path):
    import json

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    per_rank = pool(2).run(fit_tiny, 5, 2, 2, None, str(tmp_path))  # 3 steps an epoch, the last of one micro-batch
    assert per_rank[0] == per_rank[1] and len(per_rank[0]) == 6
    assert per_rank[0][-1] < per_rank[0][0]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["loss"] for row in rows] == per_rank[0]
    assert rows[0]["expert_load/model.layers.1.mlp.experts"] >= 1
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert {"loss", "learning_rate", "grad_norm", "tokens_per_s", "memory_gb"} <= set(tags)
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]


def test_a_loss_that_is_not_finite_stops_every_rank_with_the_cause(tmp_path):
    first, second = pool(2).run(fit_tiny, 2, 1, 1, "weight", str(tmp_path))
    assert first == second
    assert first.startswith("step 1: the loss is nan; the weights were not updated. On rank 0 the first output that")
    file = tmp_path / "nonfinite" / "step-00000001-rank-00000.safetensors"
    assert "is that of model.norm" in first and str(file) in first
    assert torch.equal(load_file(file)["0.input_ids"], token_batch(2, 9))
