"""Running colossalai without its advice on every rank.

Faults: colossalai/utils/safetensors.py and shardformer/layer/normalization.py warn at import, in every process, that
tensornvme and apex should be installed from source; nothing here uses either. zero/low_level/low_level_optim.py calls
`all_gather_into_tensor` and, under stage 2, `reduce_scatter_tensor`, which torch 2.13 deprecates for other names of the
same things: warnings of every rank into the progress bar.

Mend: the first two warnings are off while colossalai is imported, the others for good. No other warning is.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


def silence_deprecations() -> None:
    """Not to be told of calls that only colossalai can change."""
    message = r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated"
    warnings.filterwarnings("ignore", message=message, category=FutureWarning)


@contextmanager
def silenced() -> Iterator[None]:
    """Import colossalai inside this context."""
    with warnings.catch_warnings():
        for package in ("the latest tensornvme", "apex from source"):
            warnings.filterwarnings("ignore", message=f"Please install {package}", category=UserWarning)
        yield
