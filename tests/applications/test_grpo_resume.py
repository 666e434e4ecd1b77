"""A GRPO command that signals end in the middle of episodes, and that is started again, is the run without them."""

import json
import signal

import pytest
import torch
from grpo_command import end, lines_of, make_inputs, start
from safetensors.torch import load_file

MEASURED = ("seconds/", "tokens_per_s/", "memory_gb")  # what differs from run to run
# 2 collections of 8 completions and 2 passes of 2 steps an episode.
FLAGS = [
    "-n", "4", "--num_collect_steps", "2", "--num_update_steps", "2", "--train_batch_size", "4",
    "--accumulation_steps", "2", "--kl_coef", "0.05", "--final_temperature", "0.8", "--log_samples_interval", "1",
]  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def killed(inputs, run_dir, completion: int, number: signal.Signals, status: int, *flags) -> str:
    environment = {"KILL_AT": str(completion), "KILL_SIGNAL": str(int(number))}
    out, _ = end(start(inputs, run_dir, *FLAGS, *flags, environment=environment), status)
    return out


def test_a_run_that_signals_end_twice_is_the_run_that_none_ended(inputs, tmp_path):
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    end(start(inputs, whole, *FLAGS))
    out = killed(inputs, run_dir, 20, signal.SIGTERM, 0)  # in the first collection of episode 2
    assert (
        "stopped by SIGTERM after 1 episode and 1 of 6 steps;" in out
        and "go on with the same command and --resume latest" in out
    )
    assert not (run_dir / "lora").exists() and len(lines_of(run_dir / "metrics.jsonl")) == 1
    resume = ("--resume", "latest", "--save_interval", "1")
    killed(inputs, run_dir, 12, signal.SIGKILL, -signal.SIGKILL, *resume)  # in episode 3, after a state at its start
    assert [row["step"] for row in lines_of(run_dir / "metrics.jsonl")] == [1, 2]
    out, _ = end(start(inputs, run_dir, *FLAGS, *resume))
    assert "2 episodes are done, of 4 episodes" in out

    ours, expected = (load_file(run / "lora" / "adapter_model.safetensors") for run in (run_dir, whole))
    assert ours.keys() == expected.keys() and all(torch.equal(ours[name], expected[name]) for name in expected)
    assert comparable(run_dir / "metrics.jsonl") == comparable(whole / "metrics.jsonl")
    assert lines_of(run_dir / "samples.jsonl") == lines_of(whole / "samples.jsonl")
    summaries = [json.loads((run / "summary.json").read_text()) for run in (run_dir, whole)]
    for name in ("episodes", "steps", "reward_first", "reward_last", "skipped"):
        assert summaries[0][name] == summaries[1][name]


def comparable(file) -> list[dict]:
    return [{key: row[key] for key in row if not key.startswith(MEASURED)} for row in lines_of(file)]


def test_a_state_of_other_data_or_of_an_earlier_run_is_not_gone_on_from(inputs, tmp_path):
    run_dir, others = tmp_path / "run", tmp_path / "others.jsonl"
    killed(inputs, run_dir, 20, signal.SIGTERM, 0)
    others.write_text("".join(reversed((inputs / "prompts.jsonl").read_text().splitlines(keepends=True))))
    for flags, message in (
        (["--prompt_dataset", str(others), "--resume", "latest"], "was saved with other samples"),
        ([], "has states of an earlier run (step-00000007): go on with --resume latest"),
    ):
        _, err = end(start(inputs, run_dir, *FLAGS, *flags), status=1)
        assert message in err and "Traceback" not in err, err
