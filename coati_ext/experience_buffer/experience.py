"""A batch of completions and what is known of them. B completions, S tokens, A = S - 1 predicted positions."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


@dataclass(kw_only=True)
class Experience:
    """Rows are prompt, completion, padding: no gap, whatever the lengths, and masks come from lengths.

    Position t of what is (B, A) is about token t + 1, which the model predicts there.

    Attributes:
        sequences: (B, S) int64.
        attention_mask: (B, S) bool, false on padding.
        action_mask: (B, A) bool, true where a completion's token is predicted and is in the loss.
        action_log_probs: (B, A) fp32, of the policy that the update starts from, at the sampling temperature; None
            where it is the policy of every step, as with one step a collection.
        sampler_log_probs: (B, A) fp32, of the distribution that the tokens were drawn from.
        reference_log_probs: (B, A) fp32, of the policy without its adapter; None where there is no KL term.
        reward: (B,) fp32, NaN where a completion could not be graded.
        advantages: (B,) fp32, 0 where the reward is NaN.
    """

    sequences: Tensor
    attention_mask: Tensor
    action_mask: Tensor
    action_log_probs: Tensor | None = None
    sampler_log_probs: Tensor
    reference_log_probs: Tensor | None = None
    reward: Tensor
    advantages: Tensor

    def __post_init__(self) -> None:
        num, length = self.sequences.shape
        shapes = {"attention_mask": (num, length), "reward": (num,), "advantages": (num,)}
        for name, value in self.tensors().items():
            wanted = shapes.get(name, (num, length) if name == "sequences" else (num, length - 1))
            if value.shape != wanted:
                raise ValueError(f"experience: {name} has the shape {tuple(value.shape)}, expected {wanted}")

    def __len__(self) -> int:
        return len(self.sequences)

    def tensors(self) -> dict[str, Tensor]:
        """By name, those that are there."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in found.items() if value is not None}

    def apply(self, change: Callable[[Tensor], Tensor]) -> "Experience":
        """Of changed tensors."""
        return Experience(**{name: change(value) for name, value in self.tensors().items()})

    def to(self, device: torch.device | str) -> "Experience":
        # A copy to the host that does not wait would be read before it is there.
        return self.apply(lambda value: value.to(device, non_blocking=torch.device(device).type != "cpu"))

    def rows(self, start: int, stop: int) -> "Experience":
        """Completions [start, stop), with no more padding than they need."""
        part = self.apply(lambda value: value[start:stop])
        return part._cut(int(part.attention_mask.sum(-1).max())) if len(part) else part

    def take(self, index: Tensor) -> "Experience":
        """The rows of an index on the CPU, with no more padding than they need."""
        chosen = self.apply(lambda value: value[index.to(value.device)])
        return chosen.rows(0, len(chosen))

    def _cut(self, length: int) -> "Experience":
        surplus = self.sequences.shape[1] - length
        return self.apply(lambda t: t if t.dim() == 1 else t[:, : t.shape[1] - surplus])

    @classmethod
    def cat(cls, parts: Sequence["Experience"]) -> "Experience":
        """One batch of all rows, padded to the longest.

        Raises:
            ValueError: no parts, or parts of which only some have log-probabilities of the policy, or of the reference.
        """
        if not parts:
            raise ValueError("experience: there is nothing to join")
        names = [part.tensors().keys() for part in parts]
        if any(found != names[0] for found in names):
            raise ValueError("experience: only some parts have log-probabilities of the policy or of the reference")
        length = max(part.sequences.shape[1] for part in parts)
        padded = [part._padded(length) for part in parts]
        return cls(**{name: torch.cat([part[name] for part in padded]) for name in names[0]})

    def _padded(self, length: int) -> dict[str, Tensor]:
        missing = length - self.sequences.shape[1]
        return {name: t if t.dim() == 1 else F.pad(t, (0, missing)) for name, t in self.tensors().items()}
