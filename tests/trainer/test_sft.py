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


def fit_tiny(steps_per_epoch: int, accumulation_steps: int, num_epochs: int, poison: str | None, directory: str):
    from coati_ext import compat

    compat.apply()  # before Booster is imported
    from colossalai.booster import Booster
    from peft import LoraConfig

    from coati_ext.plugin import MoeLoraPlugin
    from coati_ext.trainer.sft import SFTTrainer
    from coati_ext.utils.metrics import MetricsLogger

    plugin = MoeLoraPlugin(ep_size=2, max_norm=1.0)
    booster = Booster(plugin=plugin)
    model = booster.enable_lora(tiny_model("mixtral"), lora_config=LoraConfig(r=4, target_modules=["mlp"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine_with_warmup(8, 1))
    inner = model
    model, optimizer, *_ = booster.boost(model, optimizer, lr_scheduler=schedule)
    if poison == "weight":
        inner.model.norm.weight.data[0] = math.nan
    ids = token_batch(2, 9)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    trainer = SFTTrainer(
        booster=booster,
        model=model,
        optimizer=optimizer,
        lr_scheduler=schedule,
        dataloader=[batch] * steps_per_epoch,
        dp_group=plugin.dp_group,
        num_epochs=num_epochs,
        accumulation_steps=accumulation_steps,
        save_dir=directory,
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
