"""The command: flags reach the preparation, errors are one line, help needs nothing heavy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from applications import prepare_dataset

ROOT = Path(__file__).parents[2]
LINES = [{"question": f"What is {i} + 1?", "answer": f"Add.\n#### {i + 1}", "id": i} for i in range(10)]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_file_becomes_prompts_and_held_out_prompts(source, tmp_path, capsys):
    output, test = tmp_path / "p.jsonl", tmp_path / "t.jsonl"
    flags = "--num_test 3 --number_gold --shuffle_seed 1 --max_samples 8 --instruction Go. --system_message Hi."
    paths = ["--input", str(source), "--output", str(output), "--test_output", str(test)]
    assert prepare_dataset.main([*paths, *flags.split()]) == 0
    assert (len(read(output)), len(read(test))) == (5, 3)
    for prompt in [*read(output), *read(test)]:
        question = LINES[prompt["id"]]["question"]
        assert prompt["messages"][0] == {"role": "system", "content": "Hi."}
        assert prompt["messages"][1] == {"role": "user", "content": f"{question}\n\nGo."}
        assert prompt["gt_answer"] == str(prompt["id"] + 1)
    shown = capsys.readouterr().out
    assert "10 read, 0 dropped" in shown and "first prompt:\n[system]\nHi.\n[user]\nWhat is" in shown


def test_fields_and_excluded_files_by_flag(source, tmp_path):
    held, output = tmp_path / "held.jsonl", tmp_path / "p.jsonl"
    assert prepare_dataset.main(["--input", str(source), "--output", str(held), "--max_samples", "4"]) == 0
    flags = ["--question_field", "question", "--gold_field", "id", "--exclude", str(held), "--output", str(output)]
    assert prepare_dataset.main(["--input", str(source), *flags]) == 0
    assert [prompt["gt_answer"] for prompt in read(output)] == list(range(4, 10))


def test_a_task_with_options(tmp_path):
    output = tmp_path / "sums.jsonl"
    flags = "--task builtin:arithmetic --num_samples 30 --seed 5 --task_options max_number=99 operations=+ num_terms=3"
    assert prepare_dataset.main([*flags.split(), "--output", str(output)]) == 0
    prompts = read(output)
    assert len(prompts) == 30
    assert all(prompt["messages"][0]["content"].count("+") == 2 for prompt in prompts)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--task builtin:arithmetics", "unknown task 'builtin:arithmetics'; near names: builtin:arithmetic"),
        ("--task builtin:arithmetic --task_options max=3", "task 'builtin:arithmetic' has no option 'max'"),
        ("--input nowhere.jsonl", "No such file or directory: 'nowhere.jsonl'"),
        ("", "expected one of --input and --task"),
    ],
)
def test_an_error_is_one_line(flags, message, tmp_path, capsys):
    output = tmp_path / "p.jsonl"
    assert prepare_dataset.main([*flags.split(), "--output", str(output)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("prepare_dataset: error: ") and message in error and error.count("\n") == 1
    assert not output.exists()


def test_an_option_that_is_no_pair_is_refused_by_the_parser(capsys):
    with pytest.raises(SystemExit):
        prepare_dataset.main(["--task", "builtin:arithmetic", "--output", "x", "--task_options", "3"])
    assert "expected KEY=VALUE, got '3'" in capsys.readouterr().err


def test_help_imports_no_torch():
    code = (
        "import sys; from applications import prepare_dataset\n"
        "try: prepare_dataset.parse(['--help'])\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n") and "--task_options" in done.stdout
