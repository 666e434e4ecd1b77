"""Importing colossalai's optimizers where bitsandbytes is absent.

Fault: colossalai/nn/optimizer/galore.py, distributed_galore.py and galore_torch/adamw8bit.py import
`bitsandbytes.optim.optimizer.Optimizer2State` at module level, and colossalai.booster imports them, so nothing imports
without a 43 MB package that only GaLore's 8-bit optimizers use.

Mend: a stand-in `bitsandbytes` that exists while those modules are imported and is removed after. It must not stay:
PEFT, transformers and accelerate take the mere presence of the module for the whole library.
"""

import importlib
import importlib.util
import sys
import types
from importlib.machinery import ModuleSpec

_STAND_IN = ("bitsandbytes", "bitsandbytes.optim", "bitsandbytes.optim.optimizer")


class Optimizer2State:
    """Base class of the 8-bit optimizers, which cannot be built without bitsandbytes."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise ImportError(f"{type(self).__name__} needs bitsandbytes: pip install bitsandbytes")


def mend() -> str | None:
    """Import colossalai's optimizers with a stand-in for bitsandbytes; returns the fault, or None if there is none."""
    if importlib.util.find_spec("bitsandbytes") is not None or "colossalai.nn.optimizer.galore" in sys.modules:
        return None

    # These remember whether bitsandbytes is there: have them ask before the stand-in exists.
    importlib.import_module("peft.import_utils").is_bnb_available()
    importlib.import_module("transformers.utils.import_utils").is_bitsandbytes_available()

    modules = {name: types.ModuleType(name) for name in _STAND_IN}
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(name, loader=None)
        module.__path__ = []
    modules["bitsandbytes.optim.optimizer"].Optimizer2State = Optimizer2State
    sys.modules.update(modules)
    try:
        importlib.import_module("colossalai.nn.optimizer")
    finally:
        for name in _STAND_IN:
            del sys.modules[name]
    return "colossalai.nn.optimizer imports bitsandbytes, which is not installed"
