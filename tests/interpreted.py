"""Triton modules of `coati_ext.kernel`, run on the CPU by Triton's interpreter; tests/gpu has them compiled."""

import importlib.util
import os
from types import ModuleType

import pytest


def interpreted(name: str) -> ModuleType:
    """A copy of the module `coati_ext.kernel.NAME`; skips the test where Triton is not installed, or compiles."""
    pytest.importorskip("triton", reason="triton, which interprets its kernels here, is not installed")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton was imported without TRITON_INTERPRET=1 (tests/conftest.py sets it where there is no GPU)")
    spec = importlib.util.find_spec(f"coati_ext.kernel.{name}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
