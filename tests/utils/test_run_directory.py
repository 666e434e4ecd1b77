import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coati_ext.utils.run_directory import check_earlier_run, drop_previous, lock_directory, set_logs_aside


def make(folder: Path, *files: str) -> Path:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def refused(folder: Path, *, result: str = "lora", overwrite: bool = False, resume: str | None = None) -> str | None:
    try:
        check_earlier_run(folder, result=result, overwrite=overwrite, resume=resume)
    except ValueError as error:
        return str(error)
    return None


def test_a_finished_result_is_replaced_on_request_only(tmp_path):
    assert refused(tmp_path / "absent") is None
    assert refused(make(tmp_path, "metrics.jsonl", "lora/README.md")) is None  # an attempt that came to nothing
    make(tmp_path, "lora/adapter_config.json")
    assert f"--save_dir {tmp_path} has the finished lora/" in refused(tmp_path)
    assert "and no state to resume from: give" in refused(tmp_path, resume="latest")
    assert refused(tmp_path, overwrite=True) is None
    assert "has the finished lora/ of another kind" in refused(tmp_path, result="model", overwrite=True)


def test_states_want_a_resume_with_and_without_overwrite(tmp_path):
    make(tmp_path, "lora/adapter_config.json", "checkpoints/step-00000003/x", "checkpoints/step-00000012/x")
    for overwrite in (False, True):
        assert "(step-00000012): go on with --resume latest" in refused(tmp_path, overwrite=overwrite)
    assert refused(tmp_path, resume="latest") is None


def test_logs_of_the_result_that_stands_are_kept_until_another_is_complete(tmp_path):
    make(tmp_path, "lora/adapter_config.json", "metrics.jsonl", "tensorboard/events")
    set_logs_aside(tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists() and not (tmp_path / "tensorboard").exists()
    (tmp_path / "metrics.jsonl").write_text("of an attempt")
    make(tmp_path, "tensorboard/other")
    set_logs_aside(tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists() and not (tmp_path / "tensorboard").exists()
    assert (tmp_path / "previous/metrics.jsonl").read_text() == "metrics.jsonl"
    assert os.listdir(tmp_path / "previous/tensorboard") == ["events"]
    drop_previous(tmp_path)
    assert os.listdir(tmp_path) == ["lora"]


def test_without_a_result_the_last_attempt_is_kept(tmp_path):
    for content in ("first", "second"):
        (tmp_path / "metrics.jsonl").write_text(content)
        set_logs_aside(tmp_path)
    assert (tmp_path / "previous/metrics.jsonl").read_text() == "second"


def test_a_directory_is_locked_by_one_process_until_it_is_killed(tmp_path):
    code = "import sys; from pathlib import Path; from coati_ext.utils.run_directory import lock_directory as lock; "
    code += "lock(Path(sys.argv[1])); print('locked', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(ValueError, match=rf"--save_dir .*another run is in it \(process {other.pid} on "):
            lock_directory(tmp_path)
        other.kill()
        other.wait()
        assert lock_directory(tmp_path) is None


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch):
    def flock(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert "cannot be locked (No locks available)" in lock_directory(tmp_path)
