"""A step of GRPO that is not finite: left out and counted, or told with the module where it began."""

import itertools

import pytest
import torch
from distributed import pool
from tiny_grpo import Layout, adapter_of, boost, fit, make_trainer, same_bits, write_prompts

BROKEN = "model.layers.1.mlp.down_proj"


def run(folder: str, zero_stage: int, skip: bool):
    """Three episodes; in the second a module of rank 0 gives NaN in training, and not where completions are drawn."""
    import torch.distributed as dist

    prompts = write_prompts(folder, list(range(12))) if dist.get_rank() == 0 else f"{folder}/prompts.jsonl"
    dist.barrier()
    boosted = boost("llama", Layout(zero_stage=zero_stage))
    trainer = make_trainer(
        boosted, prompts=prompts, plan=(3, 1, 1), skip_nonfinite=skip, max_skipped=2, save_dir=folder
    )
    module = boosted.inner.get_submodule(BROKEN)

    def poison(module, inputs, output):
        broken = module.training and trainer.episode == 1 and dist.get_rank() == 0
        return output * float("nan") if broken else output

    module.register_forward_hook(poison)
    adapters = []
    try:
        rows = fit(trainer, after_episode=lambda trainer: adapters.append(adapter_of(boosted.inner)) or {})
    except ValueError as error:
        return str(error)
    moved = [not same_bits(one, other) for one, other in itertools.pairwise(adapters)]
    finite = all(value.isfinite().all() for value in adapters[-1].values())
    return [row["skipped"] for row in rows], moved, finite, trainer.num_skipped, trainer.num_taken


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_it_is_left_out_and_counted_and_the_run_goes_on(zero_stage, tmp_path):
    for answer in pool(2).run(run, str(tmp_path), zero_stage, True):
        assert answer == ([0.0, 1.0, 0.0], [False, True], True, 1, 2)


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_it_ends_the_run_on_all_ranks_with_the_rank_and_the_module(zero_stage, tmp_path):
    first, second = pool(2).run(run, str(tmp_path), zero_stage, False)
    assert first == second and first.startswith("step 2: the loss is nan; the weights were not updated.")
    assert f"On rank 0 the first output that is not finite is that of {BROKEN}; " in first
    (file,) = (tmp_path / "nonfinite").iterdir()
    assert file.name == "step-00000002-rank-00000.safetensors"


def test_a_gradient_that_is_not_finite_is_named_before_ranks_have_added_it_up(tmp_path):
    first, second = pool(2).run(run_with_broken_gradient, str(tmp_path))
    assert first == second and "On rank 1 gradients are not finite: " in first


def run_with_broken_gradient(folder: str):
    import torch.distributed as dist

    prompts = write_prompts(folder, list(range(12))) if dist.get_rank() == 0 else f"{folder}/prompts.jsonl"
    dist.barrier()
    boosted = boost("llama")
    trainer = make_trainer(boosted, prompts=prompts)
    if dist.get_rank() == 1:
        weight = next(p for name, p in boosted.inner.named_parameters() if p.requires_grad and "layers.0" in name)
        weight.register_hook(lambda grad: torch.full_like(grad, float("inf")))
    try:
        fit(trainer)
    except ValueError as error:
        return str(error)
