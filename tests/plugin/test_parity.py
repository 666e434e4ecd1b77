"""Any layout gives the losses, the per-tensor adapter gradients and the clipped SGD steps of one process (fp32).

AdamW would hide a constant factor in a gradient; these tests compare gradients and SGD trajectories.
"""

import pytest
import torch
from distributed import pool
from parity import reference, run_layout

TOLERANCE = 1e-5  # relative, in fp32: only the order of summation differs

LAYOUTS = {  # name: (processes, ep, accumulation steps, other settings of run_layout)
    "one process": (1, 1, 1, {}),
    "accumulation 4": (1, 1, 4, {}),
    "dp 2": (2, 1, 1, {}),
    "dp 2, ZeRO 0": (2, 1, 2, {"zero_stage": 0}),
    "dp 2, ZeRO 2": (2, 1, 2, {"zero_stage": 2}),
    "ep 2": (2, 2, 1, {}),
    "ep 2, accumulation 2": (2, 2, 2, {}),
    "ep 2, ZeRO 0": (2, 2, 1, {"zero_stage": 0}),
    "ep 2, ZeRO 2": (2, 2, 2, {"zero_stage": 2}),
    "pp 2": (2, 1, 1, {"pp": 2}),
    "pp 2, micro-batches of 3": (2, 1, 2, {"pp": 2, "microbatch_size": 3}),
    "pp 2, one micro-batch": (2, 1, 1, {"pp": 2, "microbatch_size": 8}),
    "packing": (1, 1, 2, {"packing": True}),
    "ep 2, packing, checkpointing": (2, 2, 1, {"packing": True, "checkpointing": True}),
    "pp 2, packing, checkpointing": (2, 1, 2, {"pp": 2, "packing": True, "checkpointing": True}),
    "sp 2": (2, 1, 1, {"sp": 2}),
    "sp 2 x ep 2, ZeRO 0": (4, 2, 1, {"sp": 2, "zero_stage": 0}),
    "sp 2 x ep 2, ZeRO 2": (4, 2, 2, {"sp": 2, "zero_stage": 2}),
    "sp 2 x dp 2": (4, 1, 1, {"sp": 2}),
    "sp 2 x pp 2": (4, 1, 1, {"sp": 2, "pp": 2}),
    "ep 4": (4, 4, 1, {}),
    "ep 2 x dp 2": (4, 2, 2, {}),
    "ep 2 x pp 2": (4, 2, 1, {"pp": 2}),
    "ep 2 x pp 2, packing": (4, 2, 2, {"pp": 2, "packing": True}),  # the ranks pack into unlike numbers of rows
    "pp 2 x dp 2, ZeRO 0": (4, 1, 2, {"pp": 2, "zero_stage": 0}),
}
FAMILIES = {"mixtral": ["all"], "deepseek_v3": ["mlp"], "llama": ["all"]}

_references: dict = {}


def cached_reference(family, num_used, **kwargs):
    key = (family, num_used, *kwargs.items())
    if key not in _references:
        _references[key] = reference(family, FAMILIES[family], num_used=num_used, **kwargs)
    return _references[key]


def assert_same_gradients(ours: dict, expected: dict) -> None:
    assert ours.keys() == expected.keys()
    for name, exact in expected.items():
        error = (ours[name] - exact).norm() / exact.norm().clamp(min=1e-12)
        assert error <= TOLERANCE, f"{name}: relative error {error:.2e}, norms {ours[name].norm()} and {exact.norm()}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("family", "num_used"), [("mixtral", None), ("mixtral", 1), ("deepseek_v3", None), ("deepseek_v3", 3)]
)
def test_gradients_equal_one_process(layout, family, num_used):
    """With `num_used` set, whole ranks get no token (mixtral: one expert of four takes all)."""
    processes, ep, accumulation, settings = LAYOUTS[layout]
    losses, norms, grads = cached_reference(family, num_used)
    for rank_losses, rank_norms, rank_grads in pool(processes).run(
        run_layout_with, family, ep, accumulation, {"num_used": num_used, **settings}
    ):
        assert rank_losses == pytest.approx(losses, rel=TOLERANCE)
        assert rank_norms == pytest.approx(norms, rel=TOLERANCE)
        assert_same_gradients(rank_grads, grads)
    if num_used == 1:
        starved = [g[1:] for name, g in grads.items() if ".experts." in name]
        assert starved and not any(g.any() for g in starved)


def run_layout_with(family, ep, accumulation, kwargs):
    return run_layout(family, FAMILIES[family], ep, accumulation, **kwargs)


PIPELINES = {  # name: (processes, family, targets, settings of run_layout, of the model)
    "61 layers in little: 7 over 4 stages": (4, "deepseek_v3", ["mlp"], {"pp": 4}, {"num_hidden_layers": 7}),
    "layers by hand": (2, "llama", ["all"], {"pp": 2, "num_layers_per_stage": [3, 1]}, {"num_hidden_layers": 4}),
    "tied embeddings": (2, "llama", ["all"], {"pp": 2}, {"tie_word_embeddings": True}),
    "a stage without adapter": (2, "deepseek_v3", ["experts"], {"pp": 2, "num_layers_per_stage": [1, 2]}, {}),
    "fewer micro-batches than stages": (4, "llama", ["all"], {"pp": 4, "microbatch_size": 4}, {"num_hidden_layers": 4}),
}


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_gradients_of_uncommon_pipelines_equal_one_process(pipeline):
    processes, family, targets, settings, model_kwargs = PIPELINES[pipeline]
    losses, norms, grads = reference(family, targets, num_used=None, model_kwargs=model_kwargs)
    settings = {**settings, "model_kwargs": model_kwargs}
    for rank_losses, rank_norms, rank_grads in pool(processes).run(run_layout_on, family, targets, settings):
        assert rank_losses == pytest.approx(losses, rel=TOLERANCE)
        assert rank_norms == pytest.approx(norms, rel=TOLERANCE)
        assert_same_gradients(rank_grads, grads)


def run_layout_on(family, targets, settings):
    return run_layout(family, targets, 1, 1, **settings)


DENSE = {
    "dp 2, ZeRO 0": (2, {"zero_stage": 0}),
    "dp 2, ZeRO 1": (2, {"zero_stage": 1}),
    "dp 2, ZeRO 2": (2, {"zero_stage": 2}),
    "tp 2": (2, {"tp": 2}),
    "tp 2, ZeRO 0": (2, {"tp": 2, "zero_stage": 0}),
    "tp 2, sequence parallel": (2, {"tp": 2, "sequence_parallel": True}),
    "tp 2, packing, checkpointing": (2, {"tp": 2, "packing": True, "checkpointing": True}),
    "tp 2 x dp 2": (4, {"tp": 2}),
    "tp 2 x dp 2, ZeRO 2": (4, {"tp": 2, "zero_stage": 2}),
    "tp 2 x pp 2": (4, {"tp": 2, "pp": 2}),
}


@pytest.mark.parametrize("layout", DENSE)
def test_gradients_of_a_dense_model_equal_one_process(layout):
    processes, settings = DENSE[layout]
    losses, norms, grads = cached_reference("llama", None)
    for rank_losses, rank_norms, rank_grads in pool(processes).run(run_layout_with, "llama", 1, 2, settings):
        assert rank_losses == pytest.approx(losses, rel=TOLERANCE)
        assert rank_norms == pytest.approx(norms, rel=TOLERANCE)
        assert_same_gradients(rank_grads, grads)


@pytest.mark.parametrize("layout", ["ep 2", "ep 4", "ep 2 x dp 2", "ep 2 x pp 2", "dp 2, ZeRO 0", "ep 2, ZeRO 2"])
def test_clipped_sgd_trajectory_equals_one_process(layout):
    """Clipping uses one norm on all ranks: colossalai's own sums norms and forgets the other EP ranks' experts."""
    processes, ep, accumulation, settings = LAYOUTS[layout]
    run = {"steps": 5, "lr": 0.1, "clip": 0.5}
    losses, norms, _ = cached_reference("mixtral", None, **run)
    run |= settings
    assert min(norms) > run["clip"] and losses[-1] < losses[0]
    for rank_losses, rank_norms, _ in pool(processes).run(run_layout_with, "mixtral", ep, accumulation, run):
        assert rank_losses == pytest.approx(losses, rel=TOLERANCE)
        assert rank_norms == pytest.approx(norms, rel=10 * TOLERANCE)  # five steps of rounding, differentiated


def test_gradient_checkpointing_changes_nothing():
    _, _, grads = cached_reference("mixtral", None)
    for _, _, rank_grads in pool(2).run(run_layout_with, "mixtral", 2, 1, {"checkpointing": True}):
        assert_same_gradients(rank_grads, grads)


def test_the_comparison_sees_a_wrong_scale():
    _, _, grads = cached_reference("mixtral", None)
    with pytest.raises(AssertionError, match="relative error"):
        assert_same_gradients({name: 2 * g for name, g in grads.items()}, grads)
    assert all(isinstance(g, torch.Tensor) for g in grads.values())
