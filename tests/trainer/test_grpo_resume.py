"""A GRPO run that is stopped after each tick, and taken up by new objects every time, is the run that never stopped.

A tick is a collection or an optimizer step, so states are saved in the middle of episodes, with completions, metrics
and counts that are not finished.
"""

import pytest
import torch.distributed as dist
from distributed import pool
from parity import samples
from tiny_grpo import Layout, Metrics, adapter_of, boost, hashed, make_trainer, same_bits, write_prompts

from coati_ext.trainer.sft import cosine_with_warmup

PLAN = (4, 2, 2)  # episodes, collections, passes; of two steps each
TICKS = 4 * (2 + 2 * 2)
MEASURED = ("seconds/", "tokens_per_s/", "memory_gb")  # what differs from run to run


def keeper_of(trainer, folder: str):
    from coati_ext.trainer.state import StateKeeper

    return StateKeeper(
        trainer, save_dir=folder, settings={"seed": 7}, data_fingerprint=trainer.loader.sampler.fingerprint
    )


def new_trainer(prompts: str, layout: Layout, num_prompts: int = 2, **settings):
    """Everything that a continuation could lose: momentum, schedule, temperature, data positions of both kinds."""
    from coati_ext.dataset import ConversationCollator
    from coati_ext.trainer.language_model_batches import LanguageModelBatches

    boosted = boost("mixtral", layout, adam=True, lr=0.02, schedule=cosine_with_warmup(16, 2))
    group = boosted.plugin.dp_group
    shares = {"dp_rank": dist.get_rank(group), "dp_size": dist.get_world_size(group), "seed": 7}
    trainer = make_trainer(
        boosted,
        hashed,
        prompts=prompts,
        num_prompts=num_prompts,
        plan=PLAN,
        language_model_batches=LanguageModelBatches(samples(), ConversationCollator(0), 1, **shares),
        ptx_coef=0.2,
        kl_coef=0.05,
        dynamic_sampling_rounds=1,
        temperature_annealing_config={"start_temperature": 1.3, "end_temperature": 0.8},
        **{"accumulation_steps": 2, **settings},
    )
    return boosted, trainer


def run(prompts: str, folder: str, layout: Layout, ticks_at_a_time: int) -> dict:
    """To its end, by new objects every so many ticks."""
    logger, starts, shown, seconds = Metrics(), 0, {}, 0.0
    while True:
        boosted, trainer = new_trainer(prompts, layout)
        keeper = keeper_of(trainer, folder)
        resumed = keeper.resume("latest")
        assert resumed == (starts > 0)
        assert dist.get_rank() > 0 or keeper.seconds > seconds  # rank 0's clock, of the launches before too
        logger.rows = [row for row in logger.rows if row["step"] <= trainer.episode]
        first, starts = trainer.step, starts + 1

        def after_tick(trainer, keeper=keeper, first=first) -> bool:
            stop = trainer.step - first == ticks_at_a_time
            if stop:
                nonlocal seconds
                seconds = keeper.seconds
                keeper.save()
            return stop

        def after_episode(trainer) -> dict[str, float]:
            shown[trainer.episode] = [(c.prompt["text"], c.text, len(c.ids), c.score) for c in trainer.samples]
            return {}

        hooks = {"after_tick": after_tick, "after_episode": after_episode}
        trainer.fit(*trainer.plan_of_fit, logger, show_progress=False, **hooks)
        if trainer.step == trainer.num_steps:
            counts = (trainer.num_updates, trainer.num_idle, trainer.num_taken, trainer.loader.sampler.position)
            adapter = adapter_of(boosted.inner)
            return {"adapter": adapter, "rows": logger.rows, "starts": starts, "counts": counts, "shown": shown}


@pytest.fixture
def prompts(tmp_path) -> str:
    return write_prompts(tmp_path, [str(number) for number in range(10)])


@pytest.mark.parametrize(
    ("processes", "layout", "ticks_at_a_time"),
    [
        (1, Layout(), 1),
        (1, Layout(), 5),
        (2, Layout(ep=2), 1),
        (2, Layout(zero_stage=2), 3),
        (2, Layout(zero_stage=0), 7),
    ],
)
def test_a_run_in_pieces_is_the_run_in_one_go_bit_for_bit(prompts, tmp_path, processes, layout, ticks_at_a_time):
    whole = pool(processes).run(run, prompts, str(tmp_path / "whole"), layout, TICKS + 1)
    pieces = pool(processes).run(run, prompts, str(tmp_path / "pieces"), layout, ticks_at_a_time)
    for one, other in zip(whole, pieces, strict=True):
        assert one["starts"] == 1 and other["starts"] == -(-TICKS // ticks_at_a_time)
        assert same_bits(other["adapter"], one["adapter"])
        assert other["counts"] == one["counts"] and one["counts"][2] > 8
        assert other["shown"] == one["shown"] and all(len(rows) == 8 for rows in one["shown"].values())
        assert [row["step"] for row in one["rows"]] == [1, 2, 3, 4]
        for ours, expected in zip(other["rows"], one["rows"], strict=True):
            assert ours.keys() == expected.keys()
            differing = {key for key in expected if ours[key] != expected[key] and not key.startswith(MEASURED)}
            assert not differing, {key: (ours[key], expected[key]) for key in differing}


def saved_in_the_middle(prompts: str, folder: str, num_prompts: int) -> None:
    _, trainer = new_trainer(prompts, Layout(), num_prompts)
    keeper = keeper_of(trainer, folder)

    def after_tick(trainer) -> bool:
        if trainer.step == 3:
            keeper.save()
        return trainer.step == 3

    trainer.fit(*trainer.plan_of_fit, show_progress=False, after_tick=after_tick)


def error_of_resume(prompts: str, folder: str, num_prompts: int, settings: dict) -> str:
    _, trainer = new_trainer(prompts, Layout(), num_prompts, **settings)
    try:
        keeper_of(trainer, folder).resume("latest")
    except ValueError as error:
        return str(error)
    return "accepted"


def test_a_state_from_the_middle_of_an_episode_is_for_as_many_processes(prompts, tmp_path):
    pool(1).run(saved_in_the_middle, prompts, str(tmp_path), 2)
    for message in pool(2).run(error_of_resume, prompts, str(tmp_path), 1, {"accumulation_steps": 1}):
        assert "the middle of episode 1" in message and "number of processes" in message


@pytest.mark.parametrize(
    ("num_prompts", "settings", "flag"),
    [
        (1, {}, "--experience_batch_size x data-parallel ranks"),
        (2, {"num_generations": 8}, "--num_generations"),
        (2, {"accumulation_steps": 1}, "--num_update_steps, --train_batch_size and --accumulation_steps"),
    ],
)
def test_what_would_change_the_order_of_the_data_is_refused_by_its_flag(prompts, tmp_path, num_prompts, settings, flag):
    pool(1).run(saved_in_the_middle, prompts, str(tmp_path), 2)
    (message,) = pool(1).run(error_of_resume, prompts, str(tmp_path), num_prompts, settings)
    assert flag in message and "was saved with" in message


def test_another_prompt_file_is_refused(prompts, tmp_path):
    pool(1).run(saved_in_the_middle, prompts, str(tmp_path), 2)
    (tmp_path / "others").mkdir()
    others = write_prompts(tmp_path / "others", [str(number) for number in range(11)])
    (message,) = pool(1).run(error_of_resume, others, str(tmp_path), 2, {})
    assert "was saved with other samples" in message
