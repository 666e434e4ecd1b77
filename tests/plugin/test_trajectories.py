"""The committed trajectories: losses and gradient norms of clipped SGD on tiny models, in fp32.

A refactor leaves them as they are; a change that moves them commits new ones, made by

    python tests/plugin/test_trajectories.py

and says why.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # as pytest does, for the command above

import pytest
from distributed import pool
from parity import reference, run_layout

FILE = Path(__file__).parents[1] / "assets" / "trajectories.json"
FAMILIES = ("mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v2", "deepseek_v3", "glm4_moe", "olmoe", "llama")
RUN = {"steps": 6, "lr": 0.1, "clip": 0.5}
LAYOUTS = {  # name: (family, processes, ep, accumulation steps, settings)
    "ep 2 x pp 2": ("deepseek_v3", 4, 2, 2, {"pp": 2}),
    "ep 4": ("qwen3_moe", 4, 4, 1, {}),
    "pp 2, checkpointing, packing": ("glm4_moe", 2, 1, 2, {"pp": 2, "checkpointing": True, "packing": True}),
    "ep 2, ZeRO 2": ("qwen2_moe", 2, 2, 2, {"zero_stage": 2}),
    "tp 2 x dp 2": ("llama", 4, 1, 1, {"tp": 2}),
}


def trajectory(family: str) -> dict[str, list[float]]:
    losses, norms, _ = reference(family, ["all"], num_used=None, **RUN)
    return {"losses": losses, "grad_norms": norms}


@pytest.mark.parametrize("family", FAMILIES)
def test_one_process_follows_the_committed_trajectory(family):
    committed = json.loads(FILE.read_text())[family]
    ours = trajectory(family)
    assert ours["losses"] == pytest.approx(committed["losses"], rel=1e-5)
    assert ours["grad_norms"] == pytest.approx(committed["grad_norms"], rel=1e-4)
    assert committed["losses"][-1] < committed["losses"][0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_follow_the_committed_trajectory(layout):
    family, processes, ep, accumulation, settings = LAYOUTS[layout]
    committed = json.loads(FILE.read_text())[family]
    for losses, norms, _ in pool(processes).run(run_as, family, ep, accumulation, settings):
        assert losses == pytest.approx(committed["losses"], rel=1e-5)
        assert norms == pytest.approx(committed["grad_norms"], rel=1e-4)


def run_as(family, ep, accumulation, settings):
    return run_layout(family, ["all"], ep, accumulation, **RUN, **settings)


if __name__ == "__main__":
    FILE.write_text(json.dumps({family: trajectory(family) for family in FAMILIES}, indent=1) + "\n")
