"""Settings of every test run: one thread and no network, and GPU tests only where the GPUs are."""

import os
from pathlib import Path

import pytest

# Before torch and transformers are imported. A value set by the caller wins.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Processes started by tests find coati_ext, applications and tests from any folder.
_ROOT = str(Path(__file__).parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))

GPUS_NEEDED = {"gpu": 1, "multigpu": 2}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanted = [(item, needed) for item in items for mark, needed in GPUS_NEEDED.items() if item.get_closest_marker(mark)]
    if not wanted:
        return
    import torch

    found = torch.cuda.device_count()
    for item, needed in wanted:
        if found < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), found {found}"))


def pytest_sessionfinish() -> None:
    import sys

    if "distributed" in sys.modules:  # some test ran processes
        sys.modules["distributed"].stop_pools()
