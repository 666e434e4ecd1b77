"""Settings of every test run: one thread and no network, and GPU tests only where the GPUs are."""

import os
import signal
from pathlib import Path

import pytest

# Before torch and transformers are imported. A value set by the caller wins.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # with a GPU, tests/gpu compiles the kernels
# A shell has what it runs in the background ignore SIGINT, and nohup SIGHUP; the processes that tests start inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Processes started by tests find coati_ext, applications and tests from any folder.
_ROOT = str(Path(__file__).parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))

GPU_MARKS = ("gpu", "multigpu")  # the two ranks of `multigpu` share one GPU where there is no second (gpu/share_gpu.py)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanted = [item for item in items if any(item.get_closest_marker(mark) for mark in GPU_MARKS)]
    if not wanted:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanted:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_sessionfinish() -> None:
    import sys

    if "distributed" in sys.modules:  # some test ran processes
        sys.modules["distributed"].stop_pools()
