"""The versions that work together: the one place that states them.

`setup.py` and `install.sh` read this file by its path, before anything is installed: keep it to the standard library
and do not import coati_ext here.
"""

import importlib.metadata
import importlib.util
import platform
import re
import runpy
from pathlib import Path

COATI_EXT = "0.1.0"

# The range of vLLM 0.32, so that rollouts can share an environment with training.
PINNED = {
    "torch": ">=2.11",
    "transformers": ">=5.16,<5.20",
    "peft": ">=0.21,<0.22",
}

# Installed with --no-deps. colossalai 0.5.0 declares torch<=2.5.1, transformers==4.51.3 and peft<=0.13.2, and runs on
# the ranges above with the mends of `coati_ext.compat`. galore_torch, which colossalai imports, declares bitsandbytes
# (43 MB), which only its 8-bit optimizers use.
NO_DEPS = {
    "colossalai": "==0.5.0",
    "galore_torch": "==1.0",
}

_OPERATORS = {
    ">=": lambda found, bound: found >= bound,
    "<": lambda found, bound: found < bound,
    "==": lambda found, bound: found == bound,
}


def satisfies(version: str, spec: str) -> bool:
    """Whether `version` lies in `spec`, a comma-separated list of `>=`, `<` and `==` bounds.

    Only the release number counts: `2.11.0+cu130` and the vendors' `2.11.0a0+git1234` are 2.11, `5.20.0.dev0` is 5.20.

    Raises:
        ValueError: `version` does not start with a number, or `spec` has another operator.

    Example:
        >>> satisfies("2.11.0+cu130", ">=2.11"), satisfies("5.20.0.dev0", ">=5.16,<5.20")
        (True, False)
    """
    return all(_holds(version, bound.strip()) for bound in spec.split(","))


def _holds(version: str, bound: str) -> bool:
    parts = re.fullmatch(r"(>=|<|==)\s*(\d+(?:\.\d+)*)", bound)
    if parts is None:
        raise ValueError(f"cannot read the version bound {bound!r}: expected >=, < or == and a release number")
    return _OPERATORS[parts[1]](_release(version), _release(parts[2]))


def _release(version: str) -> tuple[int, ...]:
    number = re.match(r"v?(\d+(?:\.\d+)*)", version)
    if number is None:
        raise ValueError(f"cannot read the version {version!r}: expected it to start with a release number")
    release = [int(part) for part in number[1].split(".")]
    while release and release[-1] == 0:  # 2.11 and 2.11.0 are one release
        release.pop()
    return tuple(release)


def installed(name: str) -> str | None:
    """The version of the distribution `name` that an import would find, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def problem(name: str) -> str | None:
    """What is wrong with package `name` of `PINNED` or `NO_DEPS`, in a few words, or None if it is fine."""
    spec = {**PINNED, **NO_DEPS}[name]
    found = installed(name)
    if found is None:
        return f"{name} is not installed (needs {spec})"
    if not satisfies(found, spec):
        return f"{name} is {found} (needs {spec})"
    return None


def requirements(table: dict[str, str]) -> list[str]:
    """The entries of `PINNED` or `NO_DEPS` as pip writes them."""
    return [name + spec for name, spec in table.items()]


def check() -> None:
    """Raise unless every package of `PINNED` and `NO_DEPS` is installed in its range.

    Raises:
        ImportError: one line with every package that is wrong, what is accepted, and the commands that mend it.
    """
    wrong = {name: problem(name) for name in (*PINNED, *NO_DEPS) if problem(name)}
    if not wrong:
        return
    commands = []
    if pinned := [f"'{name}{spec}'" for name, spec in PINNED.items() if name in wrong]:
        commands.append(f"pip install {' '.join(pinned)}")
    if no_deps := [f"{name}{spec}" for name, spec in NO_DEPS.items() if name in wrong]:
        commands.append(f"pip install --no-deps {' '.join(no_deps)}")
    raise ImportError(
        f"coati_ext {COATI_EXT} cannot run here: {'; '.join(wrong.values())}. "
        f"Mend it with: {' && '.join(commands)} (or, from a clone: bash install.sh)"
    )


def table() -> str:
    """The versions of this environment, one per line, for the end of an installation and for bug reports."""
    rows = {"python": platform.python_version(), "coati_ext": COATI_EXT}
    for name in ("torch", "transformers", "peft", "colossalai", "safetensors", "triton"):
        rows[name] = installed(name)
    if rows["torch"]:
        rows["torch"] += f" ({_torch_device()})"
    return "\n".join(f"{name:<13} {version}" for name, version in rows.items() if version or name != "triton")


def _torch_device() -> str:
    """What the installed torch was built for, read from its version file so that torch is not imported."""
    spec = importlib.util.find_spec("torch")
    build = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    if build.get("cuda"):
        return f"CUDA {build['cuda']}"
    return f"ROCm {build['hip']}" if build.get("hip") else "CPU"
