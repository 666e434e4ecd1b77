import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_kernels.py")


def test_every_kernel_of_a_training_step_compiles_for_hopper():
    pytest.importorskip("triton")
    from coati_ext.kernel import (
        copy_matrices_triton,
        factor_gradient_triton,
        moe_rows_triton,
        softmax_rows_triton,
        sort_rows_triton,
    )

    modules = (copy_matrices_triton, factor_gradient_triton, moe_rows_triton, softmax_rows_triton, sort_rows_triton)
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    process = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    helpers = {"_copy", "_rows_of_tile", "_store_low", "_swiglu_gradients"}  # called by others
    found = set()
    for module in modules:
        found |= {text.partition("(")[0] for text in Path(module.__file__).read_text().split("@triton.jit\ndef ")[1:]}
    assert set(process.stdout.split()) == found - helpers
