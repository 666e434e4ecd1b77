import json
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


def tiny_trainer(
    steps_per_epoch: int,
    accumulation_steps: int,
    num_epochs: int,
    poison: str | None,
    directory: str,
    pp: int = 1,
    plugin_kwargs: dict | None = None,
    **kwargs,
):
    """A trainer of a tiny Mixtral on two ranks, with something that is not finite if asked for."""
    from coati_ext import compat

    compat.apply()  # before Booster is imported
    from colossalai.booster import Booster
    from peft import LoraConfig

    from coati_ext.plugin import MoeLoraPlugin
    from coati_ext.trainer.sft import SFTTrainer

    plugin = MoeLoraPlugin(ep_size=2 // pp, pp_size=pp, max_norm=1.0, **(plugin_kwargs or {}))
    booster = Booster(plugin=plugin)
    model = booster.enable_lora(tiny_model("mixtral"), lora_config=LoraConfig(r=4, target_modules=["mlp"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine_with_warmup(8, 1))
    inner = model
    model, optimizer, *_ = booster.boost(model, optimizer, lr_scheduler=schedule)
    if poison == "weight" and torch.distributed.get_rank() == pp - 1:
        inner.model.norm.weight.data[0] = math.nan
    if isinstance(poison, list):
        overflow_at(inner, poison)
    elif poison and poison.startswith("gradient"):
        overflow_once(inner)
    ids = token_batch(2, 9)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    return SFTTrainer(
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
        **{"skip_nonfinite": poison == "gradient, skipped", **kwargs},
    )


def fit_tiny(*args, **kwargs):
    """The losses, or the error."""
    return fit(tiny_trainer(*args, **kwargs))


def fit(trainer):
    from coati_ext.utils.metrics import MetricsLogger

    directory = trainer.save_dir
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


def overflow_at(model, steps: list[int]) -> None:
    """An infinite gradient of one adapter tensor in these steps, the first being 1; all steps if empty."""
    weight = next(p for n, p in model.named_parameters() if "lora_B" in n)
    calls = []

    def hook(grad):
        calls.append(None)
        return grad * math.inf if not steps or len(calls) in steps else grad

    weight.register_hook(hook)


def test_an_infinite_gradient_stops_every_rank_before_the_update(tmp_path):
    first, second = pool(2).run(fit_tiny, 3, 1, 1, "gradient", str(tmp_path))
    assert first == second and first.startswith("step 2: the loss is ")
    assert "the gradient norm is" in first and "On rank 1 gradients are not finite" in first
    assert "lora_B" in first and (tmp_path / "nonfinite" / "step-00000002-rank-00001.safetensors").exists()


def test_a_step_that_is_not_finite_can_be_left_out_and_counted(tmp_path):
    losses, _ = pool(2).run(fit_tiny, 4, 1, 1, "gradient, skipped", str(tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 4 and all(math.isfinite(loss) for loss in losses)
    assert ["skipped" in row for row in rows] == [False, True, False, False]
    assert "gradients are not finite" in rows[1]["skipped"] and "grad_norm" not in rows[1]
    assert rows[2]["learning_rate"] == rows[1]["learning_rate"]  # the schedule waits as well
    assert losses[2] == losses[1] > losses[3]  # the same batch again, on the same weights


def test_the_loss_falls_and_every_step_is_logged_once(tmp_path):
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


def outcome(num_steps: int, poison: list[int] | str, directory: str, kwargs: dict) -> dict:
    """How a run ended, and what `check_training` says of an export."""
    from coati_ext.trainer.setup import check_training

    trainer = tiny_trainer(num_steps, 1, 1, poison, directory, **kwargs)
    answer = {"fit": fit(trainer), "export": "accepted"}
    try:
        check_training(trainer)
    except ValueError as error:
        answer["export"] = str(error)
    names = ("num_skipped", "num_overflowed", "num_taken", "step", "loss_first", "loss_last")
    return answer | {name: getattr(trainer, name) for name in names}


def test_so_many_skipped_steps_in_a_row_end_the_run_on_every_rank(tmp_path):
    first, second = pool(2).run(outcome, 9, "weight", str(tmp_path), {"skip_nonfinite": True, "max_skipped": 3})
    assert first == second and first["step"] == first["num_skipped"] == 3
    assert first["fit"].startswith("step 3: 3 steps in a row were not finite and left out (--max_skipped 3)")
    assert "that of model.norm" in first["fit"]
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        assert "NaN" not in line and '"loss": null' in line and '"skipped": "the loss is nan' in line


def test_a_step_that_is_taken_ends_the_row_and_gives_the_losses(tmp_path):
    # A skipped step is done twice, to find the cause: steps 1, 3, 5 are calls 1, 4, 7 of the hook, and 2, 5, 8 theirs.
    calls = [1, 2, 4, 5, 7, 8]
    answer, _ = pool(2).run(outcome, 5, calls, str(tmp_path), {"skip_nonfinite": True, "max_skipped": 2})
    losses = answer["fit"]
    assert (answer["num_skipped"], answer["num_taken"], answer["export"]) == (3, 2, "accepted")
    assert (answer["loss_first"], answer["loss_last"]) == (losses[1], losses[3]) and losses[4] < losses[3]


def test_a_run_without_a_step_that_was_taken_is_not_exported(tmp_path):
    answers = pool(2).run(outcome, 2, "weight", str(tmp_path), {"skip_nonfinite": True})
    message = "none of the 2 steps was taken: 2 steps were not finite and left out; nothing is saved"
    assert [answer["export"] for answer in answers] == [message] * 2


def ruined_at_the_end(directory: str) -> str:
    from coati_ext.trainer.setup import check_training

    trainer = tiny_trainer(1, 1, 1, None, directory)
    fit(trainer)
    if torch.distributed.get_rank() == 1:
        next(p for n, p in trainer.model.named_parameters() if "lora_B" in n).data.flatten()[-1] = math.inf
    try:
        check_training(trainer)
    except ValueError as error:
        return str(error)
    return "accepted"


def test_weights_that_are_not_finite_are_not_exported(tmp_path):
    first, second = pool(2).run(ruined_at_the_end, str(tmp_path))
    assert first == second and first.startswith("after the last step weights on rank 1 are not finite: ")
    assert "lora_B" in first


# --- fp16: the loss scale falls at the second overflow and then at each


FP16 = {"precision": "fp16", "initial_scale": 4}


def test_fp16_may_overflow_until_its_loss_scale_fits(tmp_path):
    kwargs = {"plugin_kwargs": FP16, "max_skipped": 1}  # these are not among the steps that it limits
    answer, _ = pool(2).run(outcome, 5, [1, 2, 3], str(tmp_path), kwargs)
    assert (answer["num_skipped"], answer["num_overflowed"], answer["num_taken"]) == (0, 3, 2), answer
    assert answer["export"] == "accepted" and answer["loss_first"] == answer["fit"][3]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    scales = [row["skipped"].rpartition(" ")[2] for row in rows if "skipped" in row]
    assert scales == ["4", "2", "1"]


@pytest.mark.parametrize("skip", [False, True])
def test_fp16_that_overflows_at_the_lowest_scale_ends_with_an_error_that_names_it(skip, tmp_path):
    kwargs = {"plugin_kwargs": FP16, "skip_nonfinite": skip, "max_skipped": 2}
    first, second = pool(2).run(outcome, 9, [], str(tmp_path), kwargs)
    assert first == second
    assert first["fit"].startswith("step 5: 2 steps in a row" if skip else "step 4: the loss is ")
    assert "the fp16 gradients overflow at loss scale 1, the lowest" in first["fit"]
    assert "gradients are not finite" in first["fit"]
    assert (first["num_skipped"], first["num_overflowed"]) == (2 * skip, 3)


def test_fp16_whose_scale_still_falls_when_the_run_ends_is_not_exported(tmp_path):
    answer, _ = pool(2).run(outcome, 2, [], str(tmp_path), {"plugin_kwargs": FP16})
    expected = "none of the 2 steps was taken: 2 steps overflowed and lowered fp16's loss scale, which is 2 now"
    assert answer["export"] == f"{expected}; nothing is saved"
