"""Rewards of completions: `RLVRRewardModel` computes verifiable ones, `RewardModel` asks a trained model."""

import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from coati_ext.models.reward_score import REWARDS, Score, add_scores, find_reward
from coati_ext.models.reward_score.deadline_pool import DeadlinePool
from coati_ext.models.reward_score.math_expression import math_reward, require_math_verify
from coati_ext.models.reward_score.score import not_scorable

# Given for each sample or by the model itself, never as a setting.
_PER_SAMPLE = {"length", "truncated", "metadata"}
_OWN = {"pool", "deadline_s"}


class RLVRRewardModel:
    """The weighted sum of verifiable rewards (`coati_ext.models.reward_score`).

    A reward is called as `function(completion, gold, **keywords)`, with those of the settings, and of `length`,
    `truncated` and `metadata`, that its signature names, or with all if it takes any. It returns a `Score`, a number, a
    bool (which is an accuracy too) or None: this sample is not scorable. Rewards with a `deadline_s` are slow: their
    samples are graded in parallel.

    Args:
        reward_functions: names of `REWARDS`, dotted paths, or functions.
        weights: one a reward; 1 each by default.
        tags: ColossalAI's `response_format_tags`, for the rewards that take `tags`.
        num_workers: samples graded at a time, each in processes of its own; default: the processors, at most 8.
        deadline_s: for one slow grading; each reward's own default if None.
        settings: keywords of the rewards, such as `extraction="flexible"` or `max_length=1024`.

    Raises:
        ValueError: an unknown reward; a setting that no reward takes, or one missing that a reward needs.
        ImportError: the math reward without math-verify.
    """

    def __init__(
        self,
        reward_functions: Sequence[str | Callable[..., Any]],
        *,
        weights: Sequence[float] | None = None,
        tags: Mapping[str, Mapping[str, Any]] | None = None,
        num_workers: int | None = None,
        deadline_s: float | None = None,
        **settings: Any,
    ) -> None:
        if isinstance(reward_functions, str) or not reward_functions:
            raise ValueError(f"reward_functions is {reward_functions!r}; expected a list of at least one reward")
        self._functions = _by_name(reward_functions)
        self.weights = _checked_weights(weights, len(self._functions))
        if deadline_s is not None and not deadline_s > 0:
            raise ValueError(f"deadline_s is {deadline_s}; expected seconds above 0")
        self.num_workers = min(8, os.cpu_count() or 1) if num_workers is None else num_workers
        self._pool = DeadlinePool(self.num_workers)
        given = {"tags": tags, "deadline_s": deadline_s}
        settings |= {name: value for name, value in given.items() if value is not None}
        self._accepted = {name: _keywords(function, settings) for name, function in self._functions.items()}
        self._check_settings(settings)
        settings["pool"] = self._pool
        self._settings = {
            name: {key: value for key, value in settings.items() if key in accepted}
            for name, accepted in self._accepted.items()
        }
        self._slow = any("deadline_s" in accepted for accepted in self._accepted.values())
        if math_reward in self._functions.values():
            require_math_verify()

    def __call__(
        self,
        completions: Sequence[str],
        golds: Sequence[Any],
        *,
        truncated: Sequence[bool] | None = None,
        lengths: Sequence[int] | None = None,
        metadata: Sequence[Mapping[str, Any]] | None = None,
        sources: Sequence[str] | None = None,
    ) -> list[Score]:
        """One score a completion, in their order.

        Args:
            completions: what was generated, without the prompt.
            truncated: whether each was cut at the token limit; false by default.
            lengths: tokens of each; needed by the rewards of length.
            metadata: other keys of each prompt's line.
            sources: where each prompt is from, for errors.

        Raises:
            ValueError: lists of unlike lengths, or a reward that needs `lengths` without them.
            RuntimeError: a reward failed; the text names it and the sample. No failure is taken for a reward of 0.
        """
        given = {"golds": golds, "truncated": truncated, "lengths": lengths, "metadata": metadata, "sources": sources}
        for name, values in given.items():
            if values is not None and len(values) != len(completions):
                raise ValueError(f"{name} has {len(values)} entries for {len(completions)} completions")
        for key, values in {"length": lengths, "metadata": metadata}.items():
            needing = [name for name, accepted in self._accepted.items() if accepted.get(key)]
            if needing and values is None:
                raise ValueError(f"the reward {needing[0]} needs the {key} of each completion")

        def grade(index: int) -> Score:
            sample = {
                "truncated": truncated is not None and bool(truncated[index]),
                "length": None if lengths is None else int(lengths[index]),
                "metadata": {} if metadata is None else metadata[index],
            }
            what = f"sample {index}" if sources is None else f"sample {index} ({sources[index]})"
            scores = {name: self._one(name, what, completions[index], golds[index], sample) for name in self._functions}
            return add_scores(scores, self.weights)

        if not self._slow or self.num_workers == 1 or len(completions) < 2:
            return [grade(index) for index in range(len(completions))]
        with ThreadPoolExecutor(self.num_workers) as executor:
            return list(executor.map(grade, range(len(completions))))

    def close(self) -> None:
        """End the grader processes; they start again when they are needed."""
        self._pool.close()

    def _one(self, name: str, what: str, completion: str, gold: Any, sample: dict[str, Any]) -> Score:
        keywords = {key: value for key, value in sample.items() if key in self._accepted[name]}
        if self._functions[name] not in REWARDS.values():  # which may change what it is given
            gold, keywords = deepcopy((gold, keywords))
        try:
            return _as_score(self._functions[name](completion, gold, **self._settings[name], **keywords))
        except (Exception, SystemExit) as error:
            raise RuntimeError(f"reward {name} failed on {what}: {type(error).__name__}: {error}") from error

    def _check_settings(self, settings: dict[str, Any]) -> None:
        takes = {key for accepted in self._accepted.values() for key in accepted} - _PER_SAMPLE - {"pool"}
        for key in settings:
            if key not in takes:
                names = ", ".join(self._functions)
                raise ValueError(f"no reward of {names} takes {key!r}; they take {', '.join(sorted(takes)) or 'none'}")
        for name, function in self._functions.items():
            _check_types(name, function, {key: settings[key] for key in self._accepted[name] if key in settings})
        for name, accepted in self._accepted.items():
            for key, required in accepted.items():
                if required and key not in settings and key not in _PER_SAMPLE | _OWN:
                    raise ValueError(f"the reward {name} needs the setting {key}")


class RewardModel:
    """A trained reward model: one logit of a sequence classifier for each (prompt, completion).

    Args:
        pretrained: a directory that `AutoModelForSequenceClassification` loads, with its tokenizer.
        checkpoint: a directory with its weights, if they are not in `pretrained`.
        batch_size: pairs of one forward pass.
        max_length: tokens of a pair; longer ones lose their beginning. Default: the model's limit.
        device: where it runs; the GPU if there is one.
        dtype: of the weights; bf16 on a GPU, fp32 on a CPU by default.

    Raises: ValueError unless the head has one label, its weights are in the checkpoint, and padding is possible.
    """

    def __init__(
        self,
        pretrained: str | Path,
        *,
        checkpoint: str | Path | None = None,
        batch_size: int = 8,
        max_length: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; expected at least 1")
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtype = dtype or (torch.float32 if self.device.type == "cpu" else torch.bfloat16)
        source = checkpoint or pretrained
        model, info = AutoModelForSequenceClassification.from_pretrained(
            source, dtype=dtype, local_files_only=True, output_loading_info=True
        )
        if model.config.num_labels != 1:
            raise ValueError(
                f"{checkpoint or pretrained} has num_labels {model.config.num_labels}; a reward model has a head of 1"
            )
        if info["missing_keys"]:
            missing = ", ".join(sorted(info["missing_keys"]))
            raise ValueError(f"{source} has no weights for {missing}: it is no trained reward model")
        self._tokenizer = AutoTokenizer.from_pretrained(pretrained, local_files_only=True, truncation_side="left")
        if self._tokenizer.pad_token is None:
            if self._tokenizer.eos_token is None:
                raise ValueError(f"the tokenizer of {pretrained} has neither a pad nor an eos token")
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._tokenizer.padding_side = "right"
        # The head reads the last token that is not padding.
        model.config.pad_token_id = self._tokenizer.pad_token_id
        self._model = model.to(self.device).eval().requires_grad_(False)
        limit = getattr(model.config, "max_position_embeddings", None) or self._tokenizer.model_max_length
        self._max_length = max_length or limit
        self._batch_size = batch_size

    def to(self, device: torch.device | str) -> "RewardModel":
        """Move the weights, as to host memory while the policy trains."""
        self.device = torch.device(device)
        self._model.to(device)
        return self

    @torch.no_grad()
    def __call__(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        """One fp32 score a pair, in their order; prompts are texts as the policy saw them, after its template."""
        if len(prompts) != len(completions):
            raise ValueError(f"{len(prompts)} prompts for {len(completions)} completions")
        scores: list[float] = []
        for start in range(0, len(prompts), self._batch_size):
            pairs = zip(prompts[start:][: self._batch_size], completions[start:][: self._batch_size], strict=True)
            batch = self._tokenizer(
                [prompt + completion for prompt, completion in pairs],
                padding=True,
                truncation=True,
                max_length=self._max_length,
                return_tensors="pt",
            )
            inputs = {name: batch[name].to(self.device) for name in ("input_ids", "attention_mask")}
            scores += self._model(**inputs).logits.float().squeeze(-1).tolist()
        return scores


def _by_name(reward_functions: Sequence[str | Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    functions: dict[str, Callable[..., Any]] = {}
    for reward in reward_functions:
        function = find_reward(reward) if isinstance(reward, str) else reward
        if not callable(function):
            raise ValueError(f"reward_functions holds {reward!r}; expected a name, a dotted path or a function")
        name = reward if isinstance(reward, str) else getattr(reward, "__name__", type(reward).__name__)
        if name in functions or function in functions.values():
            raise ValueError(f"the reward {name} is there twice, if under another name; give it a weight instead")
        functions[name] = function
    return functions


def _checked_weights(weights: Sequence[float] | None, count: int) -> list[float]:
    weights = [1.0] * count if weights is None else [float(weight) for weight in weights]
    if len(weights) != count or not all(math.isfinite(weight) for weight in weights):
        raise ValueError(f"weights is {weights}; expected {count} finite numbers, one a reward")
    return weights


def _keywords(function: Callable[..., Any], settings: Mapping[str, Any]) -> dict[str, bool]:
    """Keyword -> whether it must be given, behind the two positions; with `**keywords`, all that there are."""
    parameters = list(inspect.signature(function).parameters.values())
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    takes_any = any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    return dict.fromkeys((*settings, *sorted(_PER_SAMPLE)) if takes_any else (), False) | {
        parameter.name: parameter.default is inspect.Parameter.empty
        for number, parameter in enumerate(parameters)
        if parameter.kind in kinds and number >= (2 if parameter.kind == kinds[1] else 0)
    }


def _check_types(name: str, function: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    """Refuse a setting that its annotation says is a number or one of some words, and is not."""
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError):
        return  # annotations of names that are not there at run time, or a callable without any
    for key, value in settings.items():
        hint = hints.get(key)
        if hint in (int, float) and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"{key} of the reward {name} is {value!r}; expected a number")
        if get_origin(hint) is Literal and value not in get_args(hint):
            expected = " or ".join(map(repr, get_args(hint)))
            raise ValueError(f"{key} of the reward {name} is {value!r}; expected {expected}")


def _as_score(value: Any) -> Score:
    if isinstance(value, Score):
        return value
    if value is None:
        return not_scorable("not_scorable")
    if isinstance(value, str | bytes):
        raise TypeError(f"it returned the text {value!r}; expected a number, a bool, a Score or None")
    number = float(value)
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")
    accuracy = number if is_bool else None
    reason = ("correct" if number else "wrong") if is_bool else "unjudged"
    return Score(score=number, accuracy=accuracy, parts={"score": number}, reason=reason)
