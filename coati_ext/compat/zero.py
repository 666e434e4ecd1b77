"""ZeRO on a CPU.

Fault: colossalai/zero/low_level/low_level_optim.py `LowLevelZeroOptimizer._sanity_checks` asserts that the accelerator
is cuda or npu ("device is required"), although the rest runs on a CPU once `cpu_accelerator` is mended.

Mend: the same checks of the parameters' dtypes without the check of the device.
"""

from typing import Any

REFUSAL = "device is required"


def mend() -> str | None:
    """Let ZeRO run on a CPU; returns the fault, or None with a GPU or nothing to mend."""
    from colossalai.accelerator import get_accelerator
    from colossalai.zero.low_level.low_level_optim import LowLevelZeroOptimizer

    if get_accelerator().name != "cpu" or REFUSAL not in LowLevelZeroOptimizer._sanity_checks.__code__.co_consts:
        return None
    LowLevelZeroOptimizer._sanity_checks = _check_dtypes
    return "colossalai's LowLevelZeroOptimizer refuses any device but cuda and npu"


def _check_dtypes(self: Any) -> None:
    for group in self.optim.param_groups:
        for param in group["params"]:
            if getattr(param, "skip_zero_check", False) is False and param.dtype != self._dtype:
                raise ValueError(
                    f"ZeRO was built for {self._dtype}, but a parameter of shape {tuple(param.shape)} is "
                    f"{param.dtype}: cast the model, or set skip_zero_check = True on the parameter"
                )
