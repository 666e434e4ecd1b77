"""Mends for colossalai 0.5.0 on the current stack. Nothing outside this folder monkeypatches anything.

Call `apply()` once, before anything of colossalai is imported or built. Each module mends one broken subsystem, says
which upstream file and fault it mends, and changes something only where that fault is present. With a GPU or an NPU
only `galore` can apply; the others are for CPUs and gloo. `launcher` is no part of `apply()`: it mends the command
`colossalai run`, as the command `coati_ext run`.
"""

import importlib

from coati_ext.compat import advice, cpu_accelerator, galore, p2p, zero

# In this order: without galore, the modules that the others mend need not be importable.
_MENDS = {
    "galore": galore.mend,
    "cpu_accelerator": cpu_accelerator.mend,
    "p2p": p2p.mend,
    "zero": zero.mend,
}
_applied: dict[str, str] | None = None


def apply() -> dict[str, str]:
    """Import colossalai and apply every mend whose fault is present. Takes seconds; later calls change nothing.

    Returns:
        `applied()`.
    """
    global _applied
    if _applied is None:
        with advice.silenced():
            _applied = {name: reason for name, mend in _MENDS.items() if (reason := mend())}
            importlib.import_module("colossalai.booster.plugin")
        advice.silence_deprecations()
    return applied()


def applied() -> dict[str, str]:
    """What `apply()` changed: the mend's name -> the fault it found. Empty before `apply()`."""
    return dict(_applied or {})
