"""Runs each call that colossalai 0.5.0 fails at on a CPU, with (--mended) or without `coati_ext.compat`.

Without, the import is tried first and then mended, for the other checks to get as far as their own fault.
Prints one JSON object: the name of the check -> "ok" or the error. A script, because mends last as long as the process.
"""

import importlib
import json
import sys
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist


def import_plugins() -> None:
    importlib.import_module("colossalai.booster.plugin")


def rng() -> None:
    from colossalai.accelerator import get_accelerator

    accelerator = get_accelerator()
    accelerator.manual_seed(7)
    state = accelerator.get_rng_state("cpu")
    first = torch.rand(3)
    accelerator.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)


def streams() -> None:
    from colossalai.accelerator import get_accelerator

    accelerator = get_accelerator()
    stream = accelerator.Stream()
    stream.wait_stream(accelerator.current_stream())
    with accelerator.stream(stream):
        accelerator.synchronize()
    torch.zeros(1).record_stream(stream)


def memory() -> None:
    from colossalai.accelerator import get_accelerator

    accelerator = get_accelerator()
    accelerator.empty_cache()
    accelerator.reset_peak_memory_stats()
    assert 50e6 < accelerator.memory_allocated() < 50e9  # bytes: this process holds torch
    assert 50e6 < accelerator.max_memory_allocated() < 50e9
    assert accelerator.current_device() == torch.device("cpu")


def p2p() -> None:
    from colossalai.pipeline.p2p import _check_device

    assert _check_device(None) == (torch.device("cpu"), False)


def zero() -> None:
    """One step of ZeRO-2 with overlapped communication equals one step of plain SGD."""
    from colossalai.zero import LowLevelZeroOptimizer

    torch.manual_seed(0)
    plain, model = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    model.load_state_dict(plain.state_dict())
    batch = torch.randn(5, 4)

    optimizer = LowLevelZeroOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5),
        initial_scale=1,
        overlap_communication=True,
        partition_grad=True,
        dp_process_group=dist.group.WORLD,
    )
    optimizer.backward(model(batch).square().mean())
    optimizer.step()

    plain(batch).square().mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    torch.testing.assert_close(model.weight, plain.weight)


def zero_refuses_other_dtypes() -> None:
    from colossalai.zero import LowLevelZeroOptimizer

    layers = torch.nn.ModuleList([torch.nn.Linear(4, 3), torch.nn.Linear(4, 3).double()])
    try:
        LowLevelZeroOptimizer(torch.optim.SGD(layers.parameters(), lr=0.5), dp_process_group=dist.group.WORLD)
    except ValueError as error:
        assert "float64" in str(error) and "(3, 4)" in str(error)
    else:
        raise AssertionError("a float64 parameter was accepted")


def gather() -> None:
    """The calls of ZeRO's `step` and reduction that torch 2.13 deprecates; they work all the same."""
    out = torch.empty(2)
    dist.all_gather_into_tensor(out, torch.ones(2))
    assert out.sum() == 2
    dist.reduce_scatter_tensor(out, 2 * torch.ones(2))
    assert out.sum() == 4


CHECKS: list[Callable[[], None]] = [rng, streams, memory, p2p, zero, zero_refuses_other_dtypes, gather]


def outcome(check: Callable[[], None]) -> str:
    try:
        check()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


def applied_with_a_gpu() -> dict[str, str]:
    """What `compat.apply()` would change where colossalai found a GPU, once its plugins are imported."""
    from colossalai.accelerator import set_accelerator

    from coati_ext import compat

    set_accelerator("cuda")
    return compat.apply()


def main() -> None:
    report = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if "--mended" in sys.argv:
            from coati_ext import compat

            report["applied"] = compat.apply()
            report["applied again"] = compat.apply()
            report["import_plugins"] = outcome(import_plugins)
        else:
            from coati_ext.compat import galore

            report["import_plugins"] = outcome(import_plugins)
            galore.mend()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        report.update({check.__name__: outcome(check) for check in CHECKS})
        dist.destroy_process_group()
        if "--mended" not in sys.argv:
            report["applied with a GPU"] = applied_with_a_gpu()
    messages = sorted({str(warning.message) for warning in caught})
    report["advice"] = [message for message in messages if "Please install" in message]
    report["deprecations"] = [message for message in messages if "_tensor` is deprecated" in message]

    import peft.import_utils
    import transformers.utils

    report["bitsandbytes seen"] = [
        "bitsandbytes" in sys.modules,
        peft.import_utils.is_bnb_available(),
        transformers.utils.is_bitsandbytes_available(),
    ]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
