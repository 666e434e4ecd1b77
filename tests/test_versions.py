import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from coati_ext import versions

ROOT = Path(__file__).parents[1]
GOOD = {"torch": "2.13.0", "transformers": "5.19.0", "peft": "0.21.2", "colossalai": "0.5.0", "galore_torch": "1.0"}


def fake_environment(folder: Path, packages: dict[str, str]) -> str:
    """A folder as `pip install --target` leaves it, with nothing but the packages' metadata."""
    for name, version in packages.items():
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return str(folder)


def check(monkeypatch, folder: Path, **changes: str | None) -> str | None:
    """The error of `versions.check` with `GOOD` and the changes installed; None stands for not installed."""
    packages = {name: version for name, version in {**GOOD, **changes}.items() if version}
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [fake_environment(folder, packages)])
        try:
            versions.check()
        except ImportError as error:
            return str(error)
    return None


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"torch": "2.11.0+cu130", "transformers": "5.17.0", "peft": "0.21.0"},
        {"torch": "2.11.0a0+git1234"},
        {"torch": "2.14.0.dev20261101+cu130"},
        {"torch": "2.11"},
        {"transformers": "5.16.0"},
        {"galore_torch": "1.0.0"},
    ],
)
def test_accepted(monkeypatch, tmp_path, changes):
    assert check(monkeypatch, tmp_path, **changes) is None


@pytest.mark.parametrize(
    "changes, expected, command",
    [
        ({"torch": "2.10.1+cu128"}, "torch is 2.10.1+cu128 (needs >=2.11)", "pip install 'torch>=2.11'"),
        ({"torch": None}, "torch is not installed (needs >=2.11)", "pip install 'torch>=2.11'"),
        (
            {"transformers": "5.20.0.dev0"},
            "transformers is 5.20.0.dev0 (needs >=5.16,<5.20)",
            "pip install 'transformers>=5.16,<5.20'",
        ),
        ({"transformers": "4.51.3"}, "transformers is 4.51.3", "pip install 'transformers>=5.16,<5.20'"),
        ({"peft": "0.22.0rc1"}, "peft is 0.22.0rc1 (needs >=0.21,<0.22)", "pip install 'peft>=0.21,<0.22'"),
        ({"colossalai": None}, "colossalai is not installed", "pip install --no-deps colossalai==0.5.0"),
        ({"colossalai": "0.5.1"}, "colossalai is 0.5.1 (needs ==0.5.0)", "pip install --no-deps colossalai==0.5.0"),
        ({"galore_torch": None}, "galore_torch is not installed", "pip install --no-deps galore_torch==1.0"),
    ],
)
def test_refused_in_one_line_with_the_command_that_mends_it(monkeypatch, tmp_path, changes, expected, command):
    error = check(monkeypatch, tmp_path, **changes)
    assert error is not None
    assert expected in error
    assert command in error
    assert "\n" not in error


def test_everything_wrong_is_said_at_once(monkeypatch, tmp_path):
    error = check(monkeypatch, tmp_path, torch="2.5.1", peft=None, colossalai=None)
    assert "torch is 2.5.1 (needs >=2.11); peft is not installed (needs >=0.21,<0.22); colossalai is" in error
    assert "pip install 'torch>=2.11' 'peft>=0.21,<0.22' && pip install --no-deps colossalai==0.5.0" in error


@pytest.mark.parametrize("version, spec", [("unknown", ">=2.11"), ("2.11", "~=2.11"), ("2.11", ">=2.x")])
def test_unreadable_version_or_bound_is_an_error(version, spec):
    with pytest.raises(ValueError, match=re.escape(repr(version if version == "unknown" else spec))):
        versions.satisfies(version, spec)


def run_python(code: str, *paths: str) -> subprocess.CompletedProcess:
    """Run with these folders and the standard library only, as where packages lie on PYTHONPATH."""
    return subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )


def test_import_checks_packages_on_pythonpath_and_loads_none(tmp_path):
    good = fake_environment(tmp_path / "good", GOOD)
    run = run_python("import coati_ext, sys; print(coati_ext.__version__, 'torch' in sys.modules)", good, str(ROOT))
    assert run.stdout == f"{versions.COATI_EXT} False\n", run.stderr
    run = run_python("import coati_ext", fake_environment(tmp_path / "bad", {**GOOD, "torch": "2.5.1"}), str(ROOT))
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith("ImportError: coati_ext 0.1.0 cannot run here: torch is 2.5.1")


def test_table_tells_the_device_that_torch_was_built_for(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(fake_environment(tmp_path, {"torch": "2.11.0+cu130"}))
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('torch was imported')")
    (tmp_path / "torch" / "version.py").write_text("cuda = '13.0'\nhip = None\n")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert "torch         2.11.0+cu130 (CUDA 13.0)" in versions.table().splitlines()
