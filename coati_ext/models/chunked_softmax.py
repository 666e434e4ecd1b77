"""The autograd functions of `log_probs.py`: softmax over a chunk of rows at a time, of logits or of a head's products.

Legend: N rows, C rows of a chunk, V vocabulary, or the slice of it that is here, H hidden.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from coati_ext.kernel.softmax_rows import SoftmaxSums, softmax_gradient, softmax_sums


@dataclass(frozen=True, kw_only=True)
class VocabularySlice:
    """Which rows of the head this rank has: from `start` on, of `size`; the others are on the ranks of `group`.

    The hidden states and the targets must be the same on all of them. Each gets all log-probabilities and the whole
    gradient of the hidden states.
    """

    group: dist.ProcessGroup
    start: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Head:
    """From the products of the LM head to the logits that are sampled from."""

    temperature: float = 1.0
    scale: float | None = None
    softcap: float | None = None
    vocabulary: VocabularySlice | None = None
    """None: all of it is here."""

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

    def softmax(
        self, logits_CV: torch.Tensor, targets_C: torch.Tensor, *, entropy: bool = False
    ) -> tuple["Normaliser", torch.Tensor, torch.Tensor | None]:
        """Over the whole vocabulary (a collective where it is shared): normaliser, log-probabilities and, if wanted,
        entropies. A target that is no word has log-probability NaN."""
        vocabulary = self.vocabulary
        start, size = (0, logits_CV.shape[-1]) if vocabulary is None else (vocabulary.start, vocabulary.size)
        here_C = targets_C - start
        sums = softmax_sums(logits_CV, here_C, weighted=entropy)
        if vocabulary is not None:
            sums = _over_ranks(sums, vocabulary.group)
        log_sum_C = sums.sum_C.log()
        log_probs_C = sums.target_C - sums.max_C - log_sum_C
        is_word_C = (targets_C >= 0) & (targets_C < size)
        entropy_C = log_sum_C - sums.weighted_C / sums.sum_C if entropy else None
        return Normaliser(sums.max_C, log_sum_C, here_C), log_probs_C.where(is_word_C, torch.nan), entropy_C

    def gradient(
        self, logits_CV: torch.Tensor, normaliser: "Normaliser", grad_C: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Of sum(grad · log-probability) with respect to the products, in `dtype`. May overwrite the logits."""
        factor = (1.0 if self.scale is None else self.scale) / self.temperature
        grad_C = grad_C if factor == 1 else grad_C * factor
        if self.softcap is None:
            return softmax_gradient(logits_CV, *normaliser, grad_C, dtype)
        slopes_CV = (logits_CV * (self.temperature / self.softcap)).square_().neg_().add_(1)
        return softmax_gradient(logits_CV, *normaliser, grad_C, logits_CV.dtype).mul_(slopes_CV).to(dtype)


class Normaliser(NamedTuple):
    """What makes probabilities of logits, exp(logit - max - log_sum), and which of them are the targets', counted from
    the first word that is here."""

    max_N: torch.Tensor
    log_sum_N: torch.Tensor
    targets_N: torch.Tensor


def _over_ranks(sums: SoftmaxSums, group: dist.ProcessGroup) -> SoftmaxSums:
    max_C = sums.max_C.clone()
    dist.all_reduce(max_C, op=dist.ReduceOp.MAX, group=group)
    below_C = sums.max_C - max_C
    shrink_C = below_C.exp()
    parts = [sums.sum_C * shrink_C, sums.target_C]
    if sums.weighted_C is not None:
        parts.append(shrink_C * (sums.weighted_C + sums.sum_C * below_C))
    totals = torch.stack(parts)
    dist.all_reduce(totals, group=group)
    return SoftmaxSums(max_C=max_C, sum_C=totals[0], target_C=totals[1], weighted_C=totals[2] if parts[2:] else None)


class LogProbs(torch.autograd.Function):
    """Log-probabilities and, if wanted, entropies from logits; the logits are kept as they came."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: torch.Tensor, targets_N: torch.Tensor, head: Head, chunks: list[slice], entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.head, ctx.chunks = head, chunks

        def softmax(chunk: slice) -> tuple:
            return head.softmax(head.logits(_wide_copy(logits_NV[chunk])), targets_N[chunk], entropy=entropy)

        normaliser, *outputs = _joined([softmax(chunk) for chunk in chunks])
        ctx.save_for_backward(logits_NV, *normaliser)
        return _without_gradient_of_entropy(ctx, *outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_N: torch.Tensor, _: torch.Tensor | None) -> tuple:
        logits_NV, *normaliser = ctx.saved_tensors
        grad_logits_NV = torch.empty_like(logits_NV)
        for chunk in ctx.chunks:
            logits_CV = ctx.head.logits(_wide_copy(logits_NV[chunk]))
            of_chunk = _rows(normaliser, chunk)
            grad_logits_NV[chunk] = ctx.head.gradient(logits_CV, of_chunk, grad_N[chunk], logits_NV.dtype)
        return grad_logits_NV, None, None, None, None


class LinearLogProbs(torch.autograd.Function):
    """The same from what goes into the head, whose products are made anew in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        head: Head,
        chunks: list[slice],
        entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.head, ctx.chunks = head, chunks

        def softmax(chunk: slice) -> tuple:
            logits_CV = head.logits(_products(hidden_NH[chunk], weight_VH, bias_V))
            return head.softmax(logits_CV, targets_N[chunk], entropy=entropy)

        normaliser, *outputs = _joined([softmax(chunk) for chunk in chunks])
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, *normaliser)
        return _without_gradient_of_entropy(ctx, *outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_N: torch.Tensor, _: torch.Tensor | None) -> tuple:
        hidden_NH, weight_VH, bias_V, *normaliser = ctx.saved_tensors
        gradients = _HeadGradients(hidden_NH, weight_VH, bias_V, ctx.needs_input_grad[:3])

        def grad_products(chunk: slice) -> torch.Tensor:  # a function: its logits are gone before the next ones
            logits_CV = ctx.head.logits(_products(hidden_NH[chunk], weight_VH, bias_V))
            return ctx.head.gradient(logits_CV, _rows(normaliser, chunk), grad_N[chunk], weight_VH.dtype)

        for chunk in ctx.chunks:
            gradients.add(chunk, grad_products(chunk))
        gradients.sum_over_ranks(ctx.head.vocabulary)
        return *gradients.rounded(), None, None, None, None


class LinearCrossEntropy(torch.autograd.Function):
    """The sum of the rows' cross-entropies. Since it is one number, whose gradient is a factor of all others, these
    are made in the forward pass from the logits that are there, up to that factor: no product is made twice."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        head: Head,
        chunks: list[slice],
        has_backward: bool,
    ) -> torch.Tensor:
        wants = ctx.needs_input_grad[:3] if has_backward else (False,) * 3
        gradients = _HeadGradients(hidden_NH, weight_VH, bias_V, wants)

        def loss(chunk: slice) -> torch.Tensor:  # a function, so that its logits are gone before the next ones
            logits_CV = head.logits(_products(hidden_NH[chunk], weight_VH, bias_V))
            normaliser, log_probs_C, _ = head.softmax(logits_CV, targets_N[chunk])
            if any(wants):
                minus_C = -torch.ones_like(log_probs_C)
                gradients.add(chunk, head.gradient(logits_CV, normaliser, minus_C, weight_VH.dtype))
            return -log_probs_C

        losses_N = torch.cat([loss(chunk) for chunk in chunks])
        gradients.sum_over_ranks(head.vocabulary)
        ctx.save_for_backward(gradients.hidden_NH, gradients.weight_VH, gradients.bias_V)
        ctx.dtype = weight_VH.dtype
        return losses_N.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        gradients = (None if kept is None else _times(kept, grad, ctx.dtype) for kept in ctx.saved_tensors)
        return *gradients, None, None, None, None


def _joined(parts: list[tuple]) -> tuple[Normaliser, torch.Tensor, torch.Tensor | None]:
    """What `Head.softmax` gave for the chunks, as for all rows."""
    normalisers, log_probs, entropies = zip(*parts, strict=True)
    normaliser = Normaliser(*(torch.cat(columns) for columns in zip(*normalisers, strict=True)))
    return normaliser, torch.cat(log_probs), None if entropies[0] is None else torch.cat(entropies)


def _rows(normaliser: list[torch.Tensor], chunk: slice) -> Normaliser:
    return Normaliser(*(column_N[chunk] for column_N in normaliser))


def _without_gradient_of_entropy(
    ctx: Any, log_probs_N: torch.Tensor, entropy_N: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if entropy_N is not None:
        ctx.mark_non_differentiable(entropy_N)
    return log_probs_N, entropy_N


class _HeadGradients:
    """Gradients of hidden states, weight and bias, added up over chunks of rows; those of the head in fp32."""

    def __init__(
        self,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        wants: tuple[bool, bool, bool],
    ) -> None:
        self._hidden_NH, self._weight_VH, wide = hidden_NH, weight_VH, wide_dtype(weight_VH)
        self.hidden_NH = torch.empty_like(hidden_NH) if wants[0] else None
        self.weight_VH = torch.zeros_like(weight_VH, dtype=wide) if wants[1] else None
        self.bias_V = torch.zeros_like(bias_V, dtype=wide) if wants[2] else None

    def add(self, chunk: slice, grad_CV: torch.Tensor) -> None:
        if self.hidden_NH is not None:
            torch.mm(grad_CV, self._weight_VH, out=self.hidden_NH[chunk])
        if self.weight_VH is not None:
            _add_product(self.weight_VH, grad_CV.T, self._hidden_NH[chunk])
        if self.bias_V is not None:
            self.bias_V += grad_CV.sum(0, dtype=self.bias_V.dtype)

    def sum_over_ranks(self, vocabulary: VocabularySlice | None) -> None:
        if vocabulary is not None and self.hidden_NH is not None:
            dist.all_reduce(self.hidden_NH, group=vocabulary.group)

    def rounded(self) -> list[torch.Tensor | None]:
        """In the dtype of the weight."""
        gradients, dtype = (self.hidden_NH, self.weight_VH, self.bias_V), self._weight_VH.dtype
        return [None if grad is None else grad.to(dtype) for grad in gradients]


def _times(grad: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Of one element in as many dimensions: a 0-dim factor would be rounded to the gradient's 16 bits first.
    return torch.mul(grad, factor.view((1,) * grad.dim()), out=torch.empty_like(grad, dtype=dtype))


def wide_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Of the softmax."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _wide_copy(logits_CV: torch.Tensor) -> torch.Tensor:
    return logits_CV.to(wide_dtype(logits_CV), copy=True)


def _products(hidden_CH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None) -> torch.Tensor:
    products_CV = _wide_mm(hidden_CH, weight_VH.T)
    return products_CV if bias_V is None else products_CV.add_(bias_V)


def _wide_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b with the result in fp32, of which halves lose nothing (fp64 stays)."""
    if a.dtype == wide_dtype(a):
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, where the total is as wide as what `_wide_mm` gives, without a tensor of its size beside it."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
