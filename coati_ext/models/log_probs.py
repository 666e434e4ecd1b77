"""Log-probabilities of given tokens, in chunks of rows.

Legend: B batch, S sequence, N rows, C rows of a chunk, V vocabulary, H hidden.

The softmax is taken in fp32 whatever the logits are: in bf16 it is wrong by hundredths of a nat, more than the policy
moves in a step. What is large is never kept: `log_probs_of` stores the logits as they came, `linear_log_probs` not even
these; both compute the softmax anew in the backward pass, a chunk at a time.
"""

from dataclasses import dataclass
from typing import Any

import torch

from coati_ext.models.loss import IGNORE_INDEX

CHUNK_SIZE = 1024  # rows; a chunk of fp32 logits of 152k words is 0.6 GB


def log_probs_of(
    logits_BSV: torch.Tensor, targets_BS: torch.Tensor, temperature: float = 1.0, *, chunk_size: int = CHUNK_SIZE
) -> torch.Tensor:
    """log softmax(logits / temperature) of each position's target.

    Args:
        targets_BS: the token that each position predicts: shifted already. Any token will do where it is masked later.
        chunk_size: rows of fp32 logits that exist at a time.

    Returns:
        The shape of the targets, fp32 (fp64 for fp64 logits).

    Raises:
        ValueError: shapes that do not fit, temperature or chunk_size not above 0.

    Example:
        >>> logits = torch.zeros(1, 2, 4)
        >>> log_probs_of(logits, torch.tensor([[0, 3]])).exp().tolist()
        [[0.25, 0.25]]
    """
    return _of_logits(logits_BSV, targets_BS, temperature, chunk_size, with_entropy=False)[0]


def log_probs_and_entropy(
    logits_BSV: torch.Tensor, targets_BS: torch.Tensor, temperature: float = 1.0, *, chunk_size: int = CHUNK_SIZE
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `log_probs_of`, with the entropy of each position's distribution: a metric, it has no gradient."""
    return _of_logits(logits_BSV, targets_BS, temperature, chunk_size, with_entropy=True)


def linear_log_probs(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    temperature: float = 1.0,
    bias: torch.Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
    logit_softcap: float | None = None,
    logit_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies from what goes into the LM head; the logits of all rows never exist together.

    logits = softcap · tanh(scale · (hidden @ weight.T + bias) / softcap) / temperature, where softcap and scale are
    those of the families that have them. Half-precision products are kept in fp32, not rounded as a head's output is.

    Args:
        weight_VH: of the LM head. A frozen one gets no gradient, nor the memory for it.

    Returns:
        log_probs_N and entropy_N, fp32 (fp64 for fp64 inputs); the entropy has no gradient.

    Raises:
        ValueError: shapes or dtypes that do not fit, or a setting not above 0.

    Example:
        >>> hidden, weight = torch.zeros(2, 3), torch.ones(4, 3)
        >>> log_probs, entropy = linear_log_probs(hidden, weight, torch.tensor([0, 3]))
        >>> log_probs.exp().tolist(), round(entropy[0].item(), 4)  # log 4
        ([0.25, 0.25], 1.3863)
    """
    _check_linear(hidden_NH, weight_VH, targets_N, bias)
    head = _Head(temperature=temperature, scale=logit_scale, softcap=logit_softcap)
    return _LinearLogProbs.apply(hidden_NH, weight_VH, bias, targets_N, head, _chunks(len(targets_N), chunk_size), True)


def linear_cross_entropy(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    ignore_index: int = IGNORE_INDEX,
    bias: torch.Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
    logit_softcap: float | None = None,
    logit_scale: float | None = None,
) -> torch.Tensor:
    """Sum of the cross-entropies of the rows that are supervised; the others do not pass the head at all.

    Arguments and errors as in `linear_log_probs`. 0 with zero gradients where no row is supervised.

    Example:
        >>> hidden, weight = torch.zeros(2, 3), torch.ones(4, 3)
        >>> round(linear_cross_entropy(hidden, weight, torch.tensor([-100, 3])).item(), 4)  # log 4
        1.3863
    """
    _check_linear(hidden_NH, weight_VH, targets_N, bias)
    head = _Head(temperature=1.0, scale=logit_scale, softcap=logit_softcap)
    rows = (targets_N != ignore_index).nonzero().squeeze(-1)
    chunks = _chunks(len(rows), chunk_size)
    return -_LinearLogProbs.apply(hidden_NH[rows], weight_VH, bias, targets_N[rows], head, chunks, False)[0].sum()


@dataclass(frozen=True)
class _Head:
    """From the products of the LM head to the logits that are sampled from."""

    temperature: float
    scale: float | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("temperature", self.temperature), ("scale", self.scale), ("softcap", self.softcap)):
            if value is not None and not value > 0:
                raise ValueError(f"log-probabilities: {name} must be above 0, got {value}")

    def logits(self, products_CV: torch.Tensor) -> torch.Tensor:
        """Overwrites the products."""
        if self.scale is not None:
            products_CV.mul_(self.scale)
        if self.softcap is not None:
            products_CV.div_(self.softcap).tanh_().mul_(self.softcap)
        return products_CV if self.temperature == 1 else products_CV.div_(self.temperature)

    def slopes(self, logits_CV: torch.Tensor) -> torch.Tensor | float:
        """d logits / d products."""
        factor = (1.0 if self.scale is None else self.scale) / self.temperature
        if self.softcap is None:
            return factor
        return (logits_CV * (self.temperature / self.softcap)).square_().neg_().add_(1).mul_(factor)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: torch.Tensor, targets_N: torch.Tensor, head: _Head, chunks: list[slice], entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.save_for_backward(logits_NV, targets_N)
        ctx.head, ctx.chunks = head, chunks
        log_probs_N, entropy_N = _outputs(logits_NV, len(targets_N), entropy)
        for rows in chunks:
            logits_CV = head.logits(_fp32_copy(logits_NV[rows]))
            _fill(rows, logits_CV, targets_N, log_probs_N, entropy_N)
        if entropy:
            ctx.mark_non_differentiable(entropy_N)
        return log_probs_N, entropy_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_N: torch.Tensor, _: torch.Tensor | None) -> tuple:
        logits_NV, targets_N = ctx.saved_tensors
        grad_logits_NV = torch.empty_like(logits_NV)
        for rows in ctx.chunks:
            logits_CV = ctx.head.logits(_fp32_copy(logits_NV[rows]))
            grad_logits_NV[rows] = _grad_products(ctx.head, logits_CV, targets_N[rows], grad_N[rows])
        return grad_logits_NV, None, None, None, None


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        head: _Head,
        chunks: list[slice],
        entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N)
        ctx.head, ctx.chunks = head, chunks
        log_probs_N, entropy_N = _outputs(hidden_NH, len(targets_N), entropy)
        for rows in chunks:
            logits_CV = head.logits(_products(hidden_NH[rows], weight_VH, bias_V))
            _fill(rows, logits_CV, targets_N, log_probs_N, entropy_N)
        if entropy:
            ctx.mark_non_differentiable(entropy_N)
        return log_probs_N, entropy_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_N: torch.Tensor, _: torch.Tensor | None) -> tuple:
        hidden_NH, weight_VH, bias_V, targets_N = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        wide = _softmax_dtype(weight_VH)
        grad_hidden_NH = torch.empty_like(hidden_NH) if wants_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=wide) if wants_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=wide) if wants_bias else None
        for rows in ctx.chunks:
            logits_CV = ctx.head.logits(_products(hidden_NH[rows], weight_VH, bias_V))
            grad_CV = _grad_products(ctx.head, logits_CV, targets_N[rows], grad_N[rows])
            if wants_bias:
                grad_bias_V += grad_CV.sum(0)
            grad_CV = grad_CV.to(weight_VH.dtype)
            if wants_hidden:
                grad_hidden_NH[rows] = grad_CV @ weight_VH
            if wants_weight:
                grad_weight_VH += _wide_mm(grad_CV.T, hidden_NH[rows])
        grad_weight_VH = grad_weight_VH.to(weight_VH.dtype) if wants_weight else None
        grad_bias_V = grad_bias_V.to(bias_V.dtype) if wants_bias else None
        return grad_hidden_NH, grad_weight_VH, grad_bias_V, None, None, None, None


def _of_logits(
    logits_BSV: torch.Tensor, targets_BS: torch.Tensor, temperature: float, chunk_size: int, *, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if logits_BSV.shape[:-1] != targets_BS.shape:
        raise ValueError(
            f"log-probabilities: logits {tuple(logits_BSV.shape)} and targets {tuple(targets_BS.shape)} do not fit"
        )
    head, chunks = _Head(temperature=temperature), _chunks(targets_BS.numel(), chunk_size)
    logits_NV = logits_BSV.reshape(-1, logits_BSV.shape[-1])
    log_probs_N, entropy_N = _LogProbs.apply(logits_NV, targets_BS.reshape(-1), head, chunks, with_entropy)
    return log_probs_N.view(targets_BS.shape), entropy_N.view(targets_BS.shape) if with_entropy else None


def _chunks(num_rows: int, chunk_size: int) -> list[slice]:
    if chunk_size < 1:
        raise ValueError(f"log-probabilities: chunk_size must be at least 1, got {chunk_size}")
    return [slice(start, min(start + chunk_size, num_rows)) for start in range(0, num_rows, chunk_size)]


def _check_linear(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, targets_N: torch.Tensor, bias_V: torch.Tensor | None
) -> None:
    fits = (
        hidden_NH.dim() == weight_VH.dim() == 2
        and hidden_NH.shape == (*targets_N.shape, weight_VH.shape[1])
        and (bias_V is None or bias_V.shape == weight_VH.shape[:1])
    )
    if not fits:
        shapes = {"hidden": hidden_NH, "weight": weight_VH, "targets": targets_N, "bias": bias_V}
        found = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in shapes.items() if tensor is not None)
        raise ValueError(
            f"log-probabilities: hidden (N, H), weight (V, H), targets (N,), bias (V,) wanted; got {found}"
        )
    if hidden_NH.dtype != weight_VH.dtype:
        raise ValueError(f"log-probabilities: hidden is {hidden_NH.dtype} but weight is {weight_VH.dtype}; cast one")


def _softmax_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _fp32_copy(logits_CV: torch.Tensor) -> torch.Tensor:
    return logits_CV.to(_softmax_dtype(logits_CV), copy=True)


def _outputs(like: torch.Tensor, num_rows: int, entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    log_probs_N = like.new_empty(num_rows, dtype=_softmax_dtype(like))
    return log_probs_N, torch.empty_like(log_probs_N) if entropy else None


def _fill(
    rows: slice,
    logits_CV: torch.Tensor,
    targets_N: torch.Tensor,
    log_probs_N: torch.Tensor,
    entropy_N: torch.Tensor | None,
) -> None:
    all_CV = torch.log_softmax(logits_CV, dim=-1)
    log_probs_N[rows] = all_CV.gather(-1, targets_N[rows, None]).squeeze(-1)
    if entropy_N is not None:
        # entr is 0 at probability 0, which a word whose logit is -inf has.
        entropy_N[rows] = torch.special.entr(all_CV.exp_()).sum(-1)


def _grad_products(head: _Head, logits_CV: torch.Tensor, targets_C: torch.Tensor, grad_C: torch.Tensor) -> torch.Tensor:
    """Gradient of sum(grad · log-probability) with respect to the products."""
    grad_CV = torch.softmax(logits_CV, dim=-1).mul_(-grad_C[:, None])
    grad_CV.scatter_add_(-1, targets_C[:, None], grad_C[:, None].to(grad_CV.dtype))
    return grad_CV.mul_(head.slopes(logits_CV))


def _products(hidden_CH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None) -> torch.Tensor:
    products_CV = _wide_mm(hidden_CH, weight_VH.T)
    return products_CV if bias_V is None else products_CV.add_(bias_V)


def _wide_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b with the result in fp32, of which halves lose nothing (fp64 stays)."""
    if a.dtype == _softmax_dtype(a):
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
