"""Draw the next token: temperature, top-k, top-p, and noise that depends on (seed, row, step) alone.

Legend: B batch, V vocabulary, K tokens that may be drawn, most probable first.
"""

import hashlib
from dataclasses import dataclass

import torch

# Of SplitMix64, as signed numbers.
_GOLDEN, _FIRST, _SECOND = (x - (1 << 64) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
# Numbers of noise that are made at a time: 512 MB on an accelerator; on a CPU what stays in its cache, twice as fast.
_ELEMENTS, _ELEMENTS_CPU = 1 << 26, 1 << 18


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How completions are drawn and where they end."""

    max_new_tokens: int

    temperature: float = 1.0
    """0 takes the most probable token."""

    top_p: float = 1.0
    """Least mass of the most probable tokens that are kept, after temperature and top-k."""

    top_k: int = 0
    """How many of the most probable tokens are kept; 0 keeps all."""

    stop_ids: tuple[int, ...]
    """Any of them ends a completion, of which it is the last token."""

    stop_strings: tuple[str, ...] = ()
    """Any of them in the completion's text ends it, at the token that completes the string."""

    min_new_tokens: int = 0
    """No end before this many tokens: until then a stop id cannot be drawn and stop strings are not looked for."""

    def __post_init__(self) -> None:
        for name, accepted, fits in (
            ("max_new_tokens", "1 or more", self.max_new_tokens >= 1),
            ("temperature", "0 (greedy) or more", 0 <= self.temperature < float("inf")),
            ("top_p", "above 0 and at most 1", 0 < self.top_p <= 1),
            ("top_k", "0 (off) or more", self.top_k >= 0),
            ("min_new_tokens", "0 to max_new_tokens", 0 <= self.min_new_tokens <= self.max_new_tokens),
            ("stop_strings", "no empty string", all(self.stop_strings)),
            ("stop_ids", "token ids of 0 or more", all(token >= 0 for token in self.stop_ids)),
        ):
            if not fits:
                raise ValueError(f"{name} is {getattr(self, name)}; accepted: {accepted}")


def row_key(seed: tuple[int, ...], prompt: int, sample: int) -> int:
    """64 signed bits, the start of a row's noise.

    Example:
        >>> row_key((1,), 0, 0) == row_key((1,), 0, 0), row_key((1,), 0, 0) == row_key((1,), 0, 1)
        (True, False)
    """
    text = repr((*map(int, seed), int(prompt), int(sample))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def noise_of_step(key_B: torch.Tensor, step_B: torch.Tensor) -> torch.Tensor:
    """64 bits (B,): the output number `step_B` of the generators that start at `key_B`.

    SplitMix64 (Steele, Lea, Flood 2014) in wrapping int64 products: no generator, no state, no loop over the rows.
    """
    x = key_B + (step_B + 1) * _GOLDEN
    x = (x ^ _shift_right(x, 30)) * _FIRST
    x = (x ^ _shift_right(x, 27)) * _SECOND
    return x ^ _shift_right(x, 31)


def gumbel_noise(noise_B: torch.Tensor, token_BK: torch.Tensor) -> torch.Tensor:
    """fp32 (B, K) of the standard Gumbel distribution, by row, step and token id."""
    x = noise_B[:, None] ^ (token_BK * _GOLDEN)  # mixed in place from here on: it is the largest tensor of a draw
    x ^= _shift_right(x, 32)
    x *= _FIRST
    x ^= _shift_right(x, 29)
    x *= _SECOND
    uniform_BK = (_shift_right(x, 24).float() + 0.5) * 2.0**-40  # fine near 0, where rare tokens win
    return -(-torch.log1p(-uniform_BK)).log()


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # zeros come in, where `>>` brings copies of the sign


def stop_mask(sampling: Sampling, num_tokens: int, device: torch.device) -> torch.Tensor | None:
    """bool (V,): what cannot be drawn before `min_new_tokens`; None if that is nothing."""
    if not (sampling.min_new_tokens and sampling.stop_ids):
        return None
    stops_V = torch.zeros(num_tokens, dtype=torch.bool, device=device)
    for token in sampling.stop_ids:
        stops_V[token].fill_(True)  # an index of tensors would have to be copied to the device, which waits for it
    return stops_V


def draw_tokens(
    logits_BV: torch.Tensor,
    sampling: Sampling,
    key_B: torch.Tensor,
    step_B: torch.Tensor,
    stops_V: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(Tokens (B,), their log-probs (B,) fp32) under the distribution that they were drawn from.

    Greedy tokens have their log-prob at temperature 1. Otherwise the token with the largest sum of log-prob and Gumbel
    noise: rounding of the logits changes it about as rarely as it changes the distribution. (The inverse of the
    cumulative distribution, one number a row, is cheaper, but a sum over 49,152 tokens shifts so much by rounding that
    1 in 250 tokens of SmolLM2-135M in fp32 changed with the batch size.)

    Args:
        step_B: how many tokens of its completion a row has already.
        stops_V: `stop_mask`, so that it is made once; made here by default.
    """
    if stops_V is None:
        stops_V = stop_mask(sampling, logits_BV.shape[1], logits_BV.device)
    elements = _ELEMENTS_CPU if logits_BV.device.type == "cpu" else _ELEMENTS
    rows = max(1, elements // logits_BV.shape[1])
    parts = zip(logits_BV.split(rows), key_B.split(rows), step_B.split(rows), strict=True)
    tokens, log_probs = zip(*(_draw(logits, sampling, key, step, stops_V) for logits, key, step in parts), strict=True)
    return torch.cat(tokens), torch.cat(log_probs)


def _draw(
    logits_BV: torch.Tensor,
    sampling: Sampling,
    key_B: torch.Tensor,
    step_B: torch.Tensor,
    stops_V: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_BV = logits_BV.float()
    token_BK = torch.arange(logits_BV.shape[1], device=logits_BV.device).expand_as(logits_BV)
    if stops_V is not None:
        early_B1 = (step_B < sampling.min_new_tokens)[:, None]
        logits_BV = logits_BV.masked_fill(early_B1 & stops_V, float("-inf"))
    if sampling.temperature == 0:
        log_probs_BK = logits_BV.log_softmax(-1)
        place_B1 = log_probs_BK.argmax(-1, keepdim=True)
    else:
        log_probs_BK = (logits_BV / sampling.temperature).log_softmax(-1)
        if sampling.top_k or sampling.top_p < 1:
            log_probs_BK, token_BK = log_probs_BK.topk(min(sampling.top_k or logits_BV.shape[1], logits_BV.shape[1]))
            log_probs_BK = log_probs_BK.log_softmax(-1)
        if sampling.top_p < 1:
            probs_BK = log_probs_BK.exp()
            beyond_BK = probs_BK.cumsum(-1) - probs_BK >= sampling.top_p
            log_probs_BK = log_probs_BK.masked_fill(beyond_BK, float("-inf")).log_softmax(-1)
        noise_BK = gumbel_noise(noise_of_step(key_B, step_B), token_BK)
        place_B1 = (log_probs_BK + noise_BK).argmax(-1, keepdim=True)
    return token_BK.gather(1, place_B1)[:, 0], log_probs_BK.gather(1, place_B1)[:, 0]
