"""Log-probabilities of given tokens, in chunks of rows.

Legend: B batch, S sequence, N rows, C rows of a chunk, V vocabulary, H hidden.

The softmax is taken in fp32 whatever the logits are: in bf16 it is wrong by hundredths of a nat, more than the policy
moves in a step. What is large is never kept: `log_probs_of` stores the logits as they came, `linear_log_probs` not even
these; both make the probabilities anew in the backward pass, a chunk at a time. `linear_cross_entropy` needs no second
time: it makes its gradients in the forward pass.
"""

import torch

from coati_ext.models.chunked_softmax import Head, LinearCrossEntropy, LinearLogProbs, LogProbs, VocabularySlice
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
    vocabulary: VocabularySlice | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies from what goes into the LM head; the logits of all rows never exist together.

    logits = softcap · tanh(scale · (hidden @ weight.T + bias) / softcap) / temperature, where softcap and scale are
    those of the families that have them. Half-precision products are kept in fp32, not rounded as a head's output is.

    Args:
        weight_VH: of the LM head. A frozen one gets no gradient, nor the memory for it.
        vocabulary: where ranks share the head: which of its rows `weight_VH` and `bias` are. Collective then.

    Returns:
        log_probs_N and entropy_N, fp32 (fp64 for fp64 inputs); the entropy has no gradient. NaN for a target that is
        no word.

    Raises:
        ValueError: shapes or dtypes that do not fit, or a setting not above 0.

    Example:
        >>> hidden, weight = torch.zeros(2, 3), torch.ones(4, 3)
        >>> log_probs, entropy = linear_log_probs(hidden, weight, torch.tensor([0, 3]))
        >>> log_probs.exp().tolist(), round(entropy[0].item(), 4)  # log 4
        ([0.25, 0.25], 1.3863)
    """
    _check_linear(hidden_NH, weight_VH, targets_N, bias)
    head = Head(temperature=temperature, scale=logit_scale, softcap=logit_softcap, vocabulary=vocabulary)
    return LinearLogProbs.apply(hidden_NH, weight_VH, bias, targets_N, head, _chunks(len(targets_N), chunk_size), True)


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
    vocabulary: VocabularySlice | None = None,
) -> torch.Tensor:
    """Sum of the cross-entropies of the rows that are supervised; the others do not pass the head at all.

    Arguments and errors as in `linear_log_probs`. 0 with zero gradients where no row is supervised.

    Example:
        >>> hidden, weight = torch.zeros(2, 3), torch.ones(4, 3)
        >>> round(linear_cross_entropy(hidden, weight, torch.tensor([-100, 3])).item(), 4)  # log 4
        1.3863
    """
    _check_linear(hidden_NH, weight_VH, targets_N, bias)
    head = Head(scale=logit_scale, softcap=logit_softcap, vocabulary=vocabulary)
    rows = (targets_N != ignore_index).nonzero().squeeze(-1)
    inputs = (hidden_NH[rows], weight_VH, bias, targets_N[rows], head, _chunks(len(rows), chunk_size))
    if weight_VH.dtype == torch.float16:  # whose small gradients need the loss scale before they are rounded
        return -LinearLogProbs.apply(*inputs, False)[0].sum()
    return LinearCrossEntropy.apply(*inputs, torch.is_grad_enabled())


def _of_logits(
    logits_BSV: torch.Tensor, targets_BS: torch.Tensor, temperature: float, chunk_size: int, *, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if logits_BSV.shape[:-1] != targets_BS.shape:
        raise ValueError(
            f"log-probabilities: logits {tuple(logits_BSV.shape)} and targets {tuple(targets_BS.shape)} do not fit"
        )
    head, chunks = Head(temperature=temperature), _chunks(targets_BS.numel(), chunk_size)
    logits_NV = logits_BSV.reshape(-1, logits_BSV.shape[-1])
    log_probs_N, entropy_N = LogProbs.apply(logits_NV, targets_BS.reshape(-1), head, chunks, with_entropy)
    return log_probs_N.view(targets_BS.shape), entropy_N.view(targets_BS.shape) if with_entropy else None


def _chunks(num_rows: int, chunk_size: int) -> list[slice]:
    if chunk_size < 1:
        raise ValueError(f"log-probabilities: chunk_size must be at least 1, got {chunk_size}")
    return [slice(start, min(start + chunk_size, num_rows)) for start in range(0, max(1, num_rows), chunk_size)]


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
