"""The directory of a run: one run at a time, and what an earlier run left stays until the new one is complete."""

import errno
import os
import shutil
import socket
from pathlib import Path

ADAPTER_DIR, MODEL_DIR = "lora", "model"
RESULT_DIRS = {ADAPTER_DIR: "adapter_config.json", MODEL_DIR: "config.json"}
"""Folder of a finished result -> the file that makes it one."""
STATES_DIR = "checkpoints"
LOCK_FILE, PREVIOUS_DIR = ".lock", "previous"
METRICS_FILE, SAMPLES_FILE, SUMMARY_FILE = "metrics.jsonl", "samples.jsonl", "summary.json"
PICTURE_FILE, PAGE_FILE = "report.png", "report.html"
LOGS = (METRICS_FILE, SAMPLES_FILE, SUMMARY_FILE, PICTURE_FILE, PAGE_FILE, "tensorboard")
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}


def check_earlier_run(save_dir: Path, *, result: str, overwrite: bool, resume: str | None) -> None:
    """Refuse a run that would replace the result of another, or start beside the states of one.

    Args:
        result: the folder that this run will write, a key of `RESULT_DIRS`.
        resume: the flag `--resume`.

    Raises:
        ValueError: naming the directory and what to do.
    """
    if newest := newest_state(save_dir):
        if resume is None:
            raise ValueError(
                f"{save_dir / STATES_DIR} has states of an earlier run ({newest}): go on with --resume latest, or give "
                "another --save_dir"
            )
        return
    finished = [name for name, file in RESULT_DIRS.items() if (save_dir / name / file).is_file()]
    if result in finished and not overwrite:
        why = ", and no state to resume from" if resume == "latest" else ""
        raise ValueError(
            f"--save_dir {save_dir} has the finished {result}/ of an earlier run{why}: give another --save_dir, or "
            "--overwrite to replace it when this run is complete"
        )
    if other := set(finished) - {result}:
        raise ValueError(
            f"--save_dir {save_dir} has the finished {other.pop()}/ of another kind of run, which this one ({result}/) "
            "would not replace: give another --save_dir"
        )


def newest_state(save_dir: Path) -> str | None:
    """The name of the state after the most steps, whole or not; None without any."""
    return max((entry.name for entry in (save_dir / STATES_DIR).glob("step-*")), default=None)


def lock_directory(directory: Path) -> str | None:
    """Lock the directory for as long as this process lives; returns a warning where the file system has no locks.

    The kernel releases the lock, whatever ends the process.

    Raises:
        ValueError: another process has the lock.
        OSError: the lock's file cannot be written.
    """
    import fcntl

    file = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)  # not closed: that would release the lock
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(file, 200, 0).decode(errors="replace").strip()
        os.close(file)
        raise ValueError(
            f"--save_dir {directory}: another run is in it ({holder or 'just started'}); wait for its end, or give "
            "another --save_dir"
        ) from None
    except OSError as error:
        os.close(file)
        if error.errno not in _NO_LOCKS:
            raise
        return f"warning: {directory} cannot be locked ({error.strerror}): let no other run write to it"
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return None


def set_logs_aside(save_dir: Path) -> None:
    """Move an earlier run's logs to the folder previous, where `drop_previous` deletes them.

    Logs there of a result that still stands are kept, and those of an attempt that came to nothing are deleted.
    """
    found = [save_dir / name for name in LOGS if (save_dir / name).exists()]
    if not found:
        return
    previous = save_dir / PREVIOUS_DIR
    has_result = any((save_dir / name / file).is_file() for name, file in RESULT_DIRS.items())
    keep = has_result and previous.is_dir()
    if not keep:
        drop_previous(save_dir)
        previous.mkdir()
    for entry in found:
        if not keep:
            entry.rename(previous / entry.name)
        elif entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def drop_previous(save_dir: Path) -> None:
    """Delete the earlier run's logs; called when this run's result is complete."""
    previous = save_dir / PREVIOUS_DIR
    if previous.is_dir():
        shutil.rmtree(previous)
