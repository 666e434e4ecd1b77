"""Forward and backward of LM head and cross-entropy: ours, and what else there is, in one run.

Legend: N tokens, H hidden, V vocabulary.

4·N·H·V operations are counted where the head is frozen, as under LoRA: of the logits and of the hidden states'
gradient; 6·N·H·V where it is trained. Memory is the peak above what is there before a step: hidden states, head and
labels.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

from coati_ext.benchmark.timing import device_name, dtype_of, matmul_tflops, measure
from coati_ext.models.log_probs import linear_cross_entropy

SHAPES = {"deepseek_v3": (7168, 129280), "qwen3_30b_a3b": (2048, 151936), "mixtral_8x7b": (4096, 32000)}  # H, V
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One engine on one shape."""

    shape: str
    num_tokens: int
    engine: str
    ms: float
    of_ceiling: float
    """Counted work by time, as a share of the rate of a large matrix product in this run."""
    peak_gb: float
    loss: float


def compare(
    shapes: dict[str, tuple[int, int]],
    tokens: Sequence[int],
    engines: Sequence[str],
    *,
    train_head: bool = False,
    steps: int = 7,
    show: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure, and show each row when it is there; engines share their inputs.

    Returns:
        {"ceiling_tflops", "rows": of `Row`, "failed": engine, shape and error of what could not run}, as JSON.

    Raises:
        ValueError: an unknown engine, or liger where Liger is not installed.
    """
    if unknown := set(engines) - set(ENGINES):
        raise ValueError(f"--engines: unknown {', '.join(sorted(unknown))}; there are {', '.join(ENGINES)}")
    if "liger" in engines and importlib.util.find_spec("liger_kernel") is None:
        raise ValueError("--engines liger: liger-kernel is not installed; pip install liger-kernel, or leave it out")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ceiling = matmul_tflops(device)
    kind = "trained" if train_head else "frozen"
    show(f"{device_name(device)}, {dtype_of(device)}, a {kind} head; matmul {ceiling:.0f} TFLOP/s")
    show(f"{'shape':<16}{'tokens':>7} {'engine':<10}{'ms':>9}{'of matmul':>11}{'peak GB':>9}{'loss':>10}")
    report: dict[str, Any] = {"ceiling_tflops": ceiling, "rows": [], "failed": []}
    for name, (hidden, vocabulary) in shapes.items():
        for num_tokens in tokens:
            inputs = _inputs(num_tokens, hidden, vocabulary, device, train_head)
            for engine in engines:
                try:
                    ms, peak, loss = _measure(ENGINES[engine], inputs, device, steps)
                except Exception as error:  # whatever an engine of others raises; the caller sees it in the report
                    reason = f"{type(error).__name__}: {str(error).partition('.')[0]}"
                    report["failed"].append({"engine": engine, "shape": name, "error": reason})
                    show(f"{name:<16}{num_tokens:>7} {engine:<10}failed: {reason}")
                    continue
                work = (6e-9 if train_head else 4e-9) * num_tokens * hidden * vocabulary
                row = Row(
                    shape=name, num_tokens=num_tokens, engine=engine, ms=ms, of_ceiling=work / ms / ceiling,
                    peak_gb=peak / 1e9, loss=loss,
                )  # fmt: skip
                show(
                    f"{name:<16}{num_tokens:>7} {engine:<10}{ms:>9.2f}{row.of_ceiling:>11.0%}{row.peak_gb:>9.2f}"
                    f"{loss:>10.5f}"
                )
                report["rows"].append(asdict(row))
    return report


def _inputs(
    num_tokens: int, hidden: int, vocabulary: int, device: torch.device, train_head: bool
) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    like = {"device": device, "dtype": dtype_of(device)}
    hidden_NH = torch.randn(num_tokens, hidden, **like).requires_grad_()
    weight_VH = torch.randn(vocabulary, hidden, **like).mul_(0.02).requires_grad_(train_head)
    return hidden_NH, weight_VH, torch.randint(vocabulary, (num_tokens,), device=device)


def _measure(
    loss: Loss, inputs: tuple[torch.Tensor, ...], device: torch.device, steps: int
) -> tuple[float, int, float]:
    """Milliseconds, peak bytes, and the loss."""
    found = []

    def step() -> None:
        value = loss(*inputs)
        torch.autograd.grad(value, [tensor for tensor in inputs if tensor.requires_grad])
        found[:] = [value.detach()]

    return *measure(step, device, steps), found[0].item()


# --- the engines: mean loss of hidden states, head and labels


def _ours(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    return linear_cross_entropy(hidden_NH, weight_VH, labels_N) / len(labels_N)


def _logits(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """As transformers' models and their loss function compute it."""
    return F.cross_entropy(F.linear(hidden_NH, weight_VH).float(), labels_N)


def _compiled(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    return torch.compile(_logits)(hidden_NH, weight_VH, labels_N)


def _liger(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()(weight_VH, hidden_NH, labels_N)


ENGINES: dict[str, Loss] = {"ours": _ours, "logits": _logits, "compiled": _compiled, "liger": _liger}
