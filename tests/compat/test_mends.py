import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROBE = Path(__file__).with_name("probe.py")
FAULTS = {
    "import_plugins": "No module named 'bitsandbytes'",
    "rng": "not supported for cpu accelerator",
    "streams": "not supported for cpu accelerator",
    "memory": "not supported for cpu accelerator",
    "p2p": "no attribute",
    "zero": "device is required",
    "zero_refuses_other_dtypes": "device is required",
}


def run_probe(*flags: str) -> dict:
    """The report of probe.py, on a machine that looks to torch as if it had no GPU."""
    run = subprocess.run(
        [sys.executable, str(PROBE), *flags],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def unmended() -> dict:
    return run_probe()


@pytest.fixture(scope="module")
def mended() -> dict:
    return run_probe("--mended")


def skip_if_bitsandbytes_is_installed() -> None:
    if importlib.util.find_spec("bitsandbytes"):
        pytest.skip("bitsandbytes is installed: nothing to mend")


@pytest.mark.parametrize("check", FAULTS)
def test_fault_is_still_upstream(unmended, check):
    if check == "import_plugins":
        skip_if_bitsandbytes_is_installed()
    assert FAULTS[check] in unmended[check]


@pytest.mark.parametrize("check", FAULTS)
def test_mend_works(mended, check):
    assert mended[check] == "ok"


def test_apply_names_what_it_mended_and_is_idempotent(mended):
    expected = {"cpu_accelerator", "p2p", "zero"}
    if not importlib.util.find_spec("bitsandbytes"):
        expected.add("galore")
    assert set(mended["applied"]) == expected
    assert mended["applied again"] == mended["applied"]


def test_stand_in_for_bitsandbytes_is_gone_after_the_import(mended):
    skip_if_bitsandbytes_is_installed()
    assert mended["bitsandbytes seen"] == [False, False, False]


def test_import_advice_is_silenced(unmended, mended):
    assert unmended["advice"], "colossalai gives no advice any more: coati_ext/compat/advice.py can go"
    assert mended["advice"] == []


def test_zeros_deprecated_calls_are_silenced(unmended, mended):
    assert mended["gather"] == "ok" and mended["deprecations"] == []
    if importlib.metadata.version("torch") >= "2.13":
        assert len(unmended["deprecations"]) == 2, "not deprecated any more: that part of silence_deprecations can go"


def test_nothing_is_patched_with_a_gpu(unmended):
    assert unmended["applied with a GPU"] == {}


def test_galore_optimizer_without_bitsandbytes_says_what_to_install():
    from coati_ext.compat.galore import Optimizer2State

    class AdamW8bit(Optimizer2State):
        pass

    with pytest.raises(ImportError, match=r"AdamW8bit needs bitsandbytes: pip install bitsandbytes"):
        AdamW8bit([])
