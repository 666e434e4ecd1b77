"""The command as a user starts it, with and without a launcher, and what it says when something is wrong."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from model_dir import make_model_dir
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[2]
LAUNCHED = ["-m", "torch.distributed.run", "--nproc_per_node", "2"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_model_dir(tmp_path_factory.mktemp("inputs"))


def command_of(base, data, run_dir, *extra, launched=False):
    free_port = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"] if launched else []
    return [
        sys.executable, *(LAUNCHED if launched else []), *free_port, "applications/lora_finetune.py",
        "--pretrained", str(base), "--dataset", str(data), "--plugin", "moe", "--lora_rank", "4", "--lr", "1e-2",
        "--save_dir", str(run_dir), *extra,
    ]  # fmt: skip


def environment():
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


def finetune(*args, timeout=200, **kwargs):
    command = command_of(*args, **kwargs)
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout)


def steps_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(inputs, tmp_path_factory):
    """The same training on one process without a launcher and on two with ep=2; 12 samples, global batches of 4."""
    folder = tmp_path_factory.mktemp("runs")
    one, two = folder / "one", folder / "two"
    done = [
        finetune(*inputs, one, "--batch_size", "4", "-n", "2"),
        finetune(*inputs, two, "--batch_size", "2", "-n", "2", "--ep", "2", launched=True),
    ]
    for process in done:
        assert process.returncode == 0, process.stdout + process.stderr
    return one, two, done


def test_two_expert_parallel_processes_train_what_one_process_trains(runs):
    one, two, _ = runs
    losses = [[step["loss"] for step in steps_of(run)] for run in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)  # AdamW amplifies fp32 noise where gradients are near 0
    assert len(losses[0]) == 6 and losses[0][-1] < losses[0][0]
    tensors = [load_file(run / "lora" / "adapter_model.safetensors") for run in (one, two)]
    assert tensors[0].keys() == tensors[1].keys()
    assert {tuple(key.split(".")[-2:]) for key in tensors[0]} == {("lora_A", "weight"), ("lora_B", "weight")}


def test_the_run_says_what_it_does(runs):
    _, two, (_, process) = runs
    for shown in (
        "12 lines -> 12 samples",
        "What is 0 plus 0?",  # the first sample, decoded
        "4 experts (2 on this rank)",
        "6 steps in",
        "verify_adapter.py --pretrained",
    ):
        assert process.stdout.count(shown) == 1, process.stdout
    warnings = process.stderr.replace("SyntaxWarning", "")  # Python 3.12 compiling colossalai for the first time
    assert "Warning" not in warnings and process.stderr.count("loading: 100%") == 1, process.stderr
    saved = json.loads((two / "training_config.json").read_text())
    assert (saved["ep"], saved["lora_targets"], saved["seed"]) == (2, ["mlp"], 42)
    assert any((two / "tensorboard").iterdir())
    assert "expert_load/model.layers.0.mlp.experts" in steps_of(two)[0]


def test_the_export_verifies_with_stock_peft(runs, inputs):
    _, two, _ = runs
    command = [sys.executable, "applications/verify_adapter.py", "--pretrained", str(inputs[0])]
    checked = subprocess.run([*command, "--adapter", str(two / "lora")], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "PASS" in checked.stdout


def test_more_ranks_than_samples_still_train_each_sample_once(inputs, tmp_path):
    data = tmp_path / "one.jsonl"
    data.write_text(Path(inputs[1]).read_text().splitlines()[0] + "\n")
    process = finetune(inputs[0], data, tmp_path / "run", "--ep", "2", launched=True)
    assert process.returncode == 0, process.stdout + process.stderr
    assert len(steps_of(tmp_path / "run")) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ep", "3"], "--ep 3 does not divide the model's 4 experts"),
        (["--ep", "4"], "--ep 4 does not divide the 1 processes"),
        (["--lora_targets", "q_porj"], "--lora_targets: 'q_porj' matches nothing in MixtralForCausalLM"),
        (["--pretrained", "no/such/model"], "--pretrained no/such/model: no such directory"),
        (["--dataset", "no/such.jsonl"], "--dataset no/such.jsonl: no such file"),
        (["--save_dir", "setup.py"], "--save_dir setup.py: setup.py is a file"),
        (["-f"], "flash-attn is not installed"),
    ],
)
def test_a_wrong_flag_ends_with_one_line(inputs, tmp_path, flags, message):
    process = finetune(*inputs, tmp_path / "run", *flags)
    assert process.returncode == 1
    assert message in process.stderr and "Traceback" not in process.stderr


def damaged(base, folder, name, change):
    """A copy of the model in which one file is changed."""
    copy = Path(shutil.copytree(base, folder / "damaged"))
    (copy / name).write_bytes(change((copy / name).read_bytes()))
    return copy


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "tokenizer.json",
            lambda b: b.replace(b'"BPE"', b'"XYZ"'),
            "no tokenizer can be made of its ['tokenizer.json'",
        ),
        ("config.json", lambda b: b.replace(b'"silu"', b'"sillu"'), "config.json makes no model: "),
        (
            "config.json",
            lambda b: b.replace(b'"rms_norm_eps": 1e-05', b'"rms_norm_eps": "x"'),
            "config.json makes no model",
        ),
        ("model.safetensors", lambda b: b[:-1], "model.safetensors is cut short"),
    ],
)
def test_a_damaged_model_is_named_before_the_data_is_tokenised(inputs, tmp_path, name, change, message):
    base = damaged(inputs[0], tmp_path, name, change)
    assert (base / name).read_bytes() != (inputs[0] / name).read_bytes()
    process = finetune(base, inputs[1], tmp_path / "run")
    assert process.returncode == 1
    assert message in process.stderr and process.stderr.count("\n") == 1, process.stderr
    assert "12 lines" not in process.stdout and not (tmp_path / "run").exists()


def test_what_will_not_fit_is_told_before_the_data_is_tokenised(inputs, tmp_path):
    command = ["bash", "-c", 'ulimit -f 2; exec "$@"', "bash", *command_of(*inputs, tmp_path / "run")]
    process = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=200)
    assert process.returncode == 1
    assert "(ulimit -f), and the adapter would be a file of" in process.stderr and "--save_dir" in process.stderr
    assert "12 lines" not in process.stdout and "Traceback" not in process.stderr


def test_the_saved_config_is_resolved_and_taken_back_gives_the_same_run(runs, inputs, tmp_path):
    one, _, _ = runs
    saved = json.loads((one / "training_config.json").read_text())
    assert (saved["mixed_precision"], saved["warmup_steps"]) == ("fp32", 1)
    assert saved["tensorboard_dir"] == str(one / "tensorboard")
    command = [sys.executable, "applications/lora_finetune.py", "--config", str(one / "training_config.json")]
    command += ["--save_dir", str(tmp_path)]
    again = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=200)
    assert again.returncode == 1 and "--tensorboard_dir" in again.stderr, again.stderr
    command += ["--tensorboard_dir", str(tmp_path / "tensorboard")]
    again = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=200)
    assert again.returncode == 0, again.stdout + again.stderr
    assert [step["loss"] for step in steps_of(tmp_path)] == [step["loss"] for step in steps_of(one)]
    differing = {
        key for key, value in json.loads((tmp_path / "training_config.json").read_text()).items() if value != saved[key]
    }
    assert differing == {"save_dir", "tensorboard_dir"}


def test_paths_that_are_shown_work_from_the_current_directory(inputs, runs, tmp_path):
    base, data = inputs
    (tmp_path / "model").symlink_to(base)
    (tmp_path / "data.jsonl").symlink_to(data)
    command = command_of("model", "data.jsonl", "a run", "--max_steps", "1", "--init_adapter", str(runs[0] / "lora"))
    command[1] = str(ROOT / command[1])
    process = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200)
    assert process.returncode == 0, process.stdout + process.stderr
    (check,) = (line for line in process.stdout.splitlines() if "verify_adapter.py" in line)
    arguments = shlex.split(check)
    checked = subprocess.run([sys.executable, *arguments[1:]], cwd=tmp_path, capture_output=True, text=True)
    assert checked.returncode == 0 and "PASS" in checked.stdout, checked.stdout + checked.stderr
    card = (tmp_path / "a run" / "lora" / "README.md").read_text()
    assert f"- Started from: the adapter {runs[0] / 'lora'} (--init_adapter)\n" in card
    assert f"- Data: {tmp_path / 'data.jsonl'}, 1 epoch(s)" in card
    assert f"--pretrained {tmp_path / 'model'} --adapter '{tmp_path / 'a run' / 'lora'}'" in card


def test_a_data_set_smaller_than_a_global_batch_is_trained_and_that_is_said(inputs, tmp_path):
    process = finetune(*inputs, tmp_path / "run", "--batch_size", "4", "--accumulation_steps", "4", "--lora_rank", "0")
    assert process.returncode == 0, process.stdout + process.stderr
    assert "the 12 samples are fewer than a global batch of 16" in process.stdout
    assert len(steps_of(tmp_path / "run")) == 1
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "# base, fully fine-tuned" in card and f"- Base model: {inputs[0]}\n- Data: " in card


def test_a_broken_line_is_named_once_and_ends_every_rank(inputs, tmp_path):
    data = tmp_path / "broken.jsonl"
    data.write_text(Path(inputs[1]).read_text() + '[{"role": "user"}]\n')
    process = finetune(inputs[0], data, tmp_path / "run", "--ep", "2", launched=True)
    assert process.returncode == 1
    assert process.stderr.count("broken.jsonl:13:") == 1
    skipped = finetune(inputs[0], data, tmp_path / "run", "--skip_bad_lines", "--max_steps", "1")
    assert skipped.returncode == 0 and "1 bad" in skipped.stdout.lower(), skipped.stdout


def test_a_run_that_skips_step_after_step_fails_on_every_rank_and_exports_nothing(inputs, tmp_path):
    base, run_dir = tmp_path / "base", tmp_path / "run"
    shutil.copytree(inputs[0], base)
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    flags = ["--skip_nonfinite", "--max_skipped", "2", "--ep", "2", "-n", "3"]
    process = finetune(base, inputs[1], run_dir, *flags, launched=True)
    assert process.returncode == 1
    assert process.stderr.count("2 steps in a row were not finite and left out (--max_skipped 2)") == 1
    assert not (run_dir / "lora").exists() and len(steps_of(run_dir)) == 2
    assert "NaN" not in (run_dir / "metrics.jsonl").read_text()
    process = finetune(base, inputs[1], run_dir, "--skip_nonfinite", "--max_steps", "1")
    assert process.returncode == 1 and "none of the 1 steps was taken" in process.stderr, process.stderr
    assert not (run_dir / "lora").exists()


def test_a_killed_rank_ends_all_ranks_and_leaves_no_half_adapter(inputs, tmp_path):
    run_dir = tmp_path / "run"
    with subprocess.Popen(
        command_of(*inputs, run_dir, "--ep", "2", "-n", "5000", launched=True),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as launcher:
        deadline = time.monotonic() + 120
        while not (run_dir / "metrics.jsonl").exists() or not (run_dir / "metrics.jsonl").read_text():
            assert launcher.poll() is None and time.monotonic() < deadline, "training did not start"
            time.sleep(0.2)
        ranks = psutil.Process(launcher.pid).children()
        rank_1 = next(process for process in ranks if process.environ()["RANK"] == "1")
        rank_1.kill()
        assert launcher.wait(timeout=60) != 0
    assert not psutil.wait_procs(ranks, timeout=10)[1], "a rank is still running"
    assert not (run_dir / "lora").exists()
    assert steps_of(run_dir)  # what was measured until then is kept
