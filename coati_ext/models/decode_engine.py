"""The loop behind `generate`: rows of completions that step together, admitted and let go as room allows.

Legend: B rows of a batch, S columns, V vocabulary, P prompts of a forward.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature

import torch
from transformers import Cache, PreTrainedModel

from coati_ext.models.decode_graph import StaticStep
from coati_ext.models.fixed_cache import release_cache
from coati_ext.models.kv_cache import adopt_cache, join_caches, select_rows
from coati_ext.models.sampling import Sampling, draw_tokens
from coati_ext.models.stop_strings import StopStrings
from coati_ext.utils.launch import print_rank_0

PREFILL_TOKENS = 16384  # of one forward of prompts, padding included: bounds its activations
WORTH_COMPACTING = 1 / 8  # share of ended rows: to copy the others costs about what a step of attention costs
WORTH_ADMITTING = 1 / 4  # share of free rows


def forward(
    model: PreTrainedModel,
    ids_BS: torch.Tensor,
    position_BS: torch.Tensor,
    mask_BS: torch.Tensor | None,
    cache: Cache | None,
) -> tuple[torch.Tensor, Cache]:
    """(Logits of the last column (B, V), the cache) of one call of the model; `mask_BS` covers the cached columns."""
    last_only = {"logits_to_keep": 1} if "logits_to_keep" in signature(model.forward).parameters else {}
    output = model(
        input_ids=ids_BS,
        position_ids=position_BS,
        attention_mask=mask_BS,
        past_key_values=cache,
        use_cache=True,
        **last_only,
    )
    return output.logits[:, -1], output.past_key_values


@dataclass(kw_only=True)
class Row:
    """A completion in the making."""

    prompt: int
    key: int
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finished: bool = False
    ended: bool = False


@dataclass(kw_only=True)
class RowBatch:
    """Rows that step together. All end at column `width`; `pad_B` columns on the left of each are padding."""

    rows: list[Row]
    cache: Cache
    width: int
    last: int  # column at which the last row ends, at the latest
    pads: list[int]
    token_B: torch.Tensor  # drawn, not yet in the cache
    pad_B: torch.Tensor
    start_B: torch.Tensor  # column of the completion's first token
    key_B: torch.Tensor
    unread: list[tuple[torch.Tensor, torch.Tensor]]

    def select(self, keep: list[int]) -> None:
        """Keep these rows, in this order, and no columns that are padding in all of them."""
        drop = min(self.pads[i] for i in keep)
        index_B = None if len(keep) == len(self.rows) else torch.tensor(keep, device=self.token_B.device)
        if index_B is not None:
            for name in ("token_B", "pad_B", "start_B", "key_B"):
                setattr(self, name, getattr(self, name)[index_B])
        if index_B is not None or drop:
            select_rows(self.cache, index_B, drop=drop)
        self.rows = [self.rows[i] for i in keep]
        self.pads = [self.pads[i] - drop for i in keep]
        self.pad_B, self.start_B = self.pad_B - drop, self.start_B - drop
        self.width, self.last = self.width - drop, self.last - drop


def _ends(batches: list[RowBatch]) -> tuple[int, int]:
    """(`width`, `last`) of the batches side by side."""
    width = max(batch.width for batch in batches)
    return width, max(width - batch.width + batch.last for batch in batches)


def _join(batches: list[RowBatch]) -> RowBatch:
    if len(batches) == 1:
        return batches[0]
    width, last = _ends(batches)
    shifts = [width - batch.width for batch in batches]
    return RowBatch(
        rows=[row for batch in batches for row in batch.rows],
        cache=join_caches([batch.cache for batch in batches]),
        width=width,
        last=last,
        pads=[pad + shift for batch, shift in zip(batches, shifts, strict=True) for pad in batch.pads],
        token_B=torch.cat([batch.token_B for batch in batches]),
        pad_B=torch.cat([batch.pad_B + shift for batch, shift in zip(batches, shifts, strict=True)]),
        start_B=torch.cat([batch.start_B + shift for batch, shift in zip(batches, shifts, strict=True)]),
        key_B=torch.cat([batch.key_B for batch in batches]),
        unread=[],
    )


@dataclass(kw_only=True)
class DecodeEngine:
    """The rows of this rank. `turn` calls the model once; `read` takes the tokens home and lets ended rows go."""

    model: PreTrainedModel
    prompts: list[list[int]]
    sampling: Sampling
    stop_strings: StopStrings
    batch_size: int
    pad_id: int
    device: torch.device
    forward: Callable[..., tuple[torch.Tensor, Cache]] = forward
    waiting: deque[list[Row]] = field(default_factory=deque)  # rows of one prompt each, longest prompts first
    batches: list[RowBatch] = field(default_factory=list)  # one, but between a forward of prompts and the next step
    admitting: bool = False
    equal_lengths: bool = False  # only rows without padding step together
    static: StaticStep | None = None  # steps instead of `forward`, as long as it can
    error: str = ""

    def __post_init__(self) -> None:
        self._stop_ids = frozenset(self.sampling.stop_ids)

    def submit(self, rows: list[list[Row]]) -> None:
        for of_prompt in sorted(rows, key=lambda rows: -len(self.prompts[rows[0].prompt])):
            self.waiting.extend(
                of_prompt[start : start + self.batch_size] for start in range(0, len(of_prompt), self.batch_size)
            )

    @property
    def num_rows(self) -> int:
        return sum(len(batch.rows) for batch in self.batches)

    @property
    def num_left(self) -> int:
        return len(self.waiting) + self.num_rows

    def turn(self, *, dummy: bool) -> None:
        admitted = self._admit()
        if admitted:
            self._prefill(admitted)
        elif self.batches:
            self._step()
        elif dummy:
            one_BS = torch.full((1, 1), self.pad_id, device=self.device)
            self.forward(self.model, one_BS, torch.zeros_like(one_BS), None, None)

    def _admit(self) -> list[list[Row]]:
        """Rows of the next prompts, if there is room for enough of them to be worth a forward."""
        free = self.batch_size - self.num_rows
        few = self.equal_lengths or free < self.batch_size * WORTH_ADMITTING
        if self.batches and not self.admitting and few:
            return []
        admitted: list[list[Row]] = []
        while self.waiting and len(self.waiting[0]) <= free:
            width = len(self.prompts[(admitted or self.waiting)[0][0].prompt])
            if admitted and width * (len(admitted) + 1) > PREFILL_TOKENS:
                break
            if self.equal_lengths and len(self.prompts[self.waiting[0][0].prompt]) != (
                self.batches[0].width if self.batches else width
            ):
                break
            free -= len(self.waiting[0])
            admitted.append(self.waiting.popleft())
        self.admitting = bool(admitted)
        return admitted

    def _prefill(self, admitted: list[list[Row]]) -> None:
        """Each prompt once, then a row for each of its samples with its first token."""
        prompts = [self.prompts[rows[0].prompt] for rows in admitted]
        width = max(map(len, prompts))
        pads = [width - len(prompt) for prompt in prompts]
        ids_PS = torch.tensor(
            [[self.pad_id] * pad + prompt for pad, prompt in zip(pads, prompts, strict=True)], device=self.device
        )
        pad_P = torch.tensor(pads, device=self.device)
        position_PS = (torch.arange(width, device=self.device) - pad_P[:, None]).clamp(min=0)
        logits_PV, cache = self.forward(self.model, ids_PS, position_PS, _mask(pads, pad_P, width), None)
        cache = adopt_cache(cache, type(self.model).__name__)
        # transformers sizes its masks by the cache's first layer, which with MiniMax's linear attention is empty: after
        # this forward, padding would be attended to.
        self.equal_lengths = cache.get_seq_length() != width
        if self.equal_lengths and any(pads):
            self.waiting.extendleft(reversed(admitted))
            return
        source = [p for p, rows in enumerate(admitted) for _ in rows]
        rows = [row for of_prompt in admitted for row in of_prompt]
        source_B = torch.tensor(source, device=self.device)
        if len(rows) > len(admitted):
            select_rows(cache, source_B)
        batch = RowBatch(
            rows=rows,
            cache=cache,
            width=width,
            last=width + self.sampling.max_new_tokens - 1,
            pads=[pads[p] for p in source],
            token_B=source_B,
            pad_B=pad_P[source_B],
            start_B=torch.full_like(source_B, width),
            key_B=torch.tensor([row.key for row in rows], device=self.device),
            unread=[],
        )
        self._draw(batch, logits_PV[source_B])
        self.batches.append(batch)

    def _step(self) -> None:
        """The next token of all rows."""
        if len(self.batches) > 1:
            for batch in self.batches:
                self._take_home(batch)
            if self.static is not None and self.static.holds(self.batches[0].cache):
                self.static.make_room(self.num_rows, *_ends(self.batches))
            self.batches = [_join(self.batches)]
        (batch,) = self.batches
        if self.static is not None and self._static_step(batch):
            return
        # A row past its end steps on until it is read: its position stays one that the model has.
        last_B = batch.start_B + self.sampling.max_new_tokens - 1
        position_B = last_B.clamp(max=batch.width) - batch.pad_B
        batch.width += 1
        mask_BS = _mask(batch.pads, batch.pad_B, batch.width)
        logits_BV, batch.cache = self.forward(
            self.model, batch.token_B[:, None], position_B[:, None], mask_BS, batch.cache
        )
        self._draw(batch, logits_BV)

    def _static_step(self, batch: RowBatch) -> bool:
        """Whether the turn is taken. Where the step or its capture fails, this turn and all after it go without."""
        static = self.static
        try:
            static.turn(batch)
        except (RuntimeError, ValueError, TypeError) as error:
            cause = _first_line(error)
            if static.required:
                raise ValueError(f"cuda_graphs=True, but no graph can be captured: {cause}") from error
            print_rank_0(f"warning: generation goes on without CUDA graphs, none can be captured: {cause}")
            release_cache(batch.cache)
            self.static = None
        return self.static is not None

    def _draw(self, batch: RowBatch, logits_BV: torch.Tensor) -> None:
        step_B = batch.width - batch.start_B
        batch.token_B, log_prob_B = draw_tokens(logits_BV, self.sampling, batch.key_B, step_B)
        batch.unread.append((batch.token_B, log_prob_B))

    def read(self) -> None:
        """Take the tokens home, let ended rows go if enough of them have ended."""
        for batch in self.batches:
            self._take_home(batch)
            keep = [i for i, row in enumerate(batch.rows) if not row.ended]
            if keep and self._worth_compacting(batch, len(keep)):
                if self.static is not None and self.static.holds(batch.cache):
                    drop = min(batch.pads[i] for i in keep)
                    self.static.make_room(len(keep), batch.width - drop, batch.last - drop)
                batch.select(keep)
        self.batches = [batch for batch in self.batches if not all(row.ended for row in batch.rows)]

    def _worth_compacting(self, batch: RowBatch, num_kept: int) -> bool:
        ended = len(batch.rows) - num_kept
        if not ended or self.static is None or not self.static.holds(batch.cache):
            return ended > 0 and ended >= len(batch.rows) * WORTH_COMPACTING
        # A step of fixed shapes takes as long with fewer rows: they give way to others, or to a smaller shape.
        if self.waiting:
            free = self.batch_size - self.num_rows + ended
            return free >= self.batch_size * WORTH_ADMITTING and free >= len(self.waiting[0])
        return self.static.worth_shrinking(batch, num_kept)

    def _take_home(self, batch: RowBatch) -> None:
        if not batch.unread:
            return
        tokens, log_probs = zip(*batch.unread, strict=True)
        batch.unread = []
        tokens, log_probs = torch.stack(tokens, 1).tolist(), torch.stack(log_probs, 1).tolist()
        texts = self.stop_strings.suspects(
            [row.ids + new for row, new in zip(batch.rows, tokens, strict=True)], len(tokens[0])
        )
        for row, new, new_log_probs, suspect in zip(batch.rows, tokens, log_probs, texts, strict=True):
            self._extend(row, new, new_log_probs, suspect)

    def _extend(self, row: Row, tokens: list[int], log_probs: list[float], suspect: bool) -> None:
        for token, log_prob in zip(tokens, log_probs, strict=True):
            if row.ended:
                return
            row.ids.append(token)
            row.log_probs.append(log_prob)
            if log_prob != log_prob:
                self.error = f"the logits of prompt {row.prompt} are not finite at token {len(row.ids)} of a completion"
            stops = token in self._stop_ids or (suspect and self.stop_strings.completed_by_last(row.ids))
            row.finished = stops and len(row.ids) >= self.sampling.min_new_tokens
            row.ended = row.finished or len(row.ids) == self.sampling.max_new_tokens or bool(self.error)


def _first_line(error: BaseException) -> str:
    """Of what went wrong first: a capture that fails ends in an error that says only that it has failed."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _mask(pads: list[int], pad_B: torch.Tensor, width: int) -> torch.Tensor | None:
    """1 (B, width) from each row's first token on; None without padding, where attention is faster without."""
    if not any(pads):
        return None
    return (torch.arange(width, device=pad_B.device) >= pad_B[:, None]).long()
