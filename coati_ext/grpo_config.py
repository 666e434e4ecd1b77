"""The config of `applications/train_grpo.py`. Importable without torch, as `coati_ext.config` is.

Flags keep the spelling of ColossalChat's `train_grpo.py` (`ALIASES`: also where `lora_finetune.py` spells them in
another way). What it has and cannot be right here is refused by name; defaults that differ are in docs/grpo.md.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from coati_ext.config import LoraSettings, OptimConfig, OutputConfig, ParallelConfig, arg, at_least

LOSSES = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo")
ADVANTAGES = ("group_std", "group_mean", "leave_one_out")
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
KL_KINDS = ("k1", "k2", "k3")
IMPORTANCE_KINDS = ("none", "token_truncate", "token_mask", "sequence_mask", "geometric_mask")

# Of ColossalChat's LoRA file: the flag that a key is, or the only value that can be accepted.
_LORA_KEYS = {"r": "lora_rank", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}
_LORA_KEYS |= {"target_modules": "lora_targets"}
_LORA_FIXED = {
    "lora_train_bias": "none",
    "bias": "none",
    "embedding_lora_dropout": 0.0,
    "lora_initialization_method": "kaiming_uniform",
}


def _by_key(flag: str, texts: list[str]) -> dict[str, Any]:
    """Values of KEY=VALUE: JSON where they can be read as such, else text.

    Example:
        >>> _by_key("reward_options", ["format_score=0.5", "a=b"])
        {'format_score': 0.5, 'a': 'b'}
    """
    found: dict[str, Any] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key.isidentifier():
            raise ValueError(f"--{flag} takes KEY=VALUE, got {text!r}")
        if key in found:
            raise ValueError(f"--{flag} has {key} twice")
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
    return found


@dataclass(kw_only=True)
class PromptConfig:
    """What is asked, and what is trained on besides."""

    prompt_dataset: list[str] = arg(
        dataclasses.MISSING, "prompt JSONL file(s), as applications/prepare_dataset.py makes them", many=str
    )
    tokenizer_dir: str | None = arg(None, "directory of the tokenizer (default: --pretrained)")
    conversation_template_config: str | None = arg(
        None, "JSON of chat template, system message, stop ids and format tags (default: the model's own chat template)"
    )
    chat_template_kwargs: list[str] = arg(
        [], "settings of the chat template of prompts, KEY=VALUE: enable_thinking=false for Qwen3", many=str
    )
    max_length: int = arg(2048, "most tokens of a prompt and its completion together")
    max_seq_len: int = arg(
        256, "most tokens of a completion; prompts of more than --max_length minus this are left out and counted"
    )
    max_tokens_thinking: int | None = arg(None, "refused: a thinking budget that forces an answer is not built")
    skip_bad_lines: bool = arg(False, "count broken lines and go on instead of stopping at the first")
    eval_dataset: list[str] = arg([], "held-out prompt JSONL, evaluated greedily before, during and after", many=str)
    eval_interval: int = arg(0, "evaluate every so many episodes; 0: before and after only")
    eval_samples: int = arg(0, "also draw so many completions of each held-out prompt, for pass@k; 0: greedy only")
    ptx_dataset: list[str] = arg([], "conversation JSONL for the language-model loss of --ptx_coef", many=str)
    ptx_batch_size: int = arg(4, "conversations of one process in one micro-step of that loss")

    def __post_init__(self) -> None:
        if not self.prompt_dataset:
            raise ValueError("--prompt_dataset is empty; give a prompt JSONL file")
        at_least(self, 1, "max_seq_len")
        if self.max_length <= self.max_seq_len:
            raise ValueError(
                f"--max_length {self.max_length} leaves no room for a prompt beside --max_seq_len {self.max_seq_len}"
            )
        if self.max_tokens_thinking is not None:
            raise ValueError(
                "--max_tokens_thinking: ending a thought after so many tokens and forcing an answer is not built (the "
                "forced tokens are not the policy's); leave it out, --max_seq_len limits the completion"
            )
        for name in ("eval_interval", "eval_samples"):
            at_least(self, 0, name)
        at_least(self, 1, "ptx_batch_size")
        if not self.eval_dataset and (self.eval_interval or self.eval_samples):
            raise ValueError("--eval_interval and --eval_samples need --eval_dataset")
        self.template_kwargs()

    def template_kwargs(self) -> dict[str, Any]:
        return _by_key("chat_template_kwargs", self.chat_template_kwargs)

    @property
    def max_prompt_length(self) -> int:
        return self.max_length - self.max_seq_len


@dataclass(kw_only=True)
class RolloutConfig:
    """How completions are drawn."""

    experience_batch_size: int = arg(16, "prompts of one process in one collection")
    num_generations: int = arg(8, "completions of each prompt: its group")
    inference_batch_size: int = arg(128, "most completions of one process that are drawn at a time")
    logits_forward_batch_size: int = arg(16, "completions of one forward pass for log-probabilities")
    initial_temperature: float = arg(1.0, "sampling temperature of the first episode; log-probabilities follow it")
    final_temperature: float | None = arg(None, "of the last episode, annealed linearly (default: no annealing)")
    top_p: float = arg(1.0, "draw from the least set of most probable tokens with this mass")
    top_k: int = arg(0, "draw from so many most probable tokens; 0: all")
    stop_strings: list[str] = arg([], "texts that end a completion, beside the template's stop ids", many=str)
    dynamic_sampling_rounds: int = arg(
        0, "replace groups that are all right or all wrong by new prompts, up to so many times an episode (DAPO)"
    )

    def __post_init__(self) -> None:
        names = ("experience_batch_size", "inference_batch_size", "logits_forward_batch_size")
        for name in names:
            at_least(self, 1, name)
        if self.num_generations < 2:
            raise ValueError(
                f"--num_generations {self.num_generations}: a completion is compared with the others of its prompt; "
                "give 2 or more"
            )
        if self.final_temperature is None:
            self.final_temperature = self.initial_temperature
        for name in ("initial_temperature", "final_temperature"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"--{name} must be above 0, got {getattr(self, name)}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top_p must lie in (0, 1], got {self.top_p}")
        for name in ("top_k", "dynamic_sampling_rounds"):
            at_least(self, 0, name)


@dataclass(kw_only=True)
class RewardConfig:
    """What a completion is paid."""

    reward_functions: list[str] = arg(
        [],
        "number (or gsm8k), math, multiple_choice, exact_match, regex_match, code, overlong, target_length, "
        "reasoning_gym, or a function by its dotted path, package.module:function; their rewards are added",
        many=str,
    )
    reward_weights: list[float] | None = arg(None, "one for each of them (default: 1)", many=float)
    reward_options: list[str] = arg(
        [], "settings of the rewards, KEY=VALUE: format_score=1 correct_score=10 extraction=flexible", many=str
    )
    rm_pretrain: str | None = arg(None, "Hugging Face directory of a trained reward model (a classifier of one label)")
    rm_checkpoint_path: str | None = arg(None, "directory with its weights, where --rm_pretrain has only its tokenizer")
    rm_weight: float = arg(1.0, "weight of its score beside the reward functions")

    def __post_init__(self) -> None:
        if not self.reward_functions and self.rm_pretrain is None:
            raise ValueError(
                "--reward_functions is required (or --rm_pretrain): number for answers that are one number, math, "
                "multiple_choice, exact_match, code, ... or package.module:function"
            )
        if self.rm_checkpoint_path is not None and self.rm_pretrain is None:
            raise ValueError("--rm_checkpoint_path needs --rm_pretrain, for its tokenizer")
        for name in ("reward_weights", "reward_options"):
            if getattr(self, name) and not self.reward_functions:
                raise ValueError(f"--{name} is for --reward_functions, of which there are none")
        if self.reward_weights is not None and len(self.reward_weights) != len(self.reward_functions):
            raise ValueError(
                f"--reward_weights has {len(self.reward_weights)} numbers for {len(self.reward_functions)} rewards"
            )
        if not math.isfinite(self.rm_weight):
            raise ValueError(f"--rm_weight must be finite, got {self.rm_weight}")
        self.options()

    def options(self) -> dict[str, Any]:
        return _by_key("reward_options", self.reward_options)


@dataclass(kw_only=True)
class PolicyConfig:
    """The loss."""

    loss: str = arg("grpo", "policy loss", choices=LOSSES)
    advantage: str | None = arg(None, "advantage (default: the loss's own)", choices=ADVANTAGES)
    aggregation: str | None = arg(
        None, "from losses of tokens to that of a step (default: the loss's own)", choices=AGGREGATIONS
    )
    clip_eps_low: float | None = arg(None, "ratios below 1 minus this are clipped (default: the loss's own)")
    clip_eps_high: float | None = arg(None, "ratios above 1 plus this are clipped (default: the loss's own)")
    dual_clip: float | None = arg(None, "cap the loss of bad tokens that became likelier at so many times its size")
    kl_coef: float = arg(0.0, "weight of the KL term to the model without its adapter; 0: it is never computed")
    kl_kind: str = arg("k3", "estimate of that KL", choices=KL_KINDS)
    importance: str = arg(
        "auto",
        "correction where the sampler's probabilities differ from the policy's; auto: token_truncate with --top_p or "
        "--top_k, else none",
        choices=("auto", *IMPORTANCE_KINDS),
    )
    importance_cap: float = arg(2.0, "bound of its weights")
    mask_truncated: bool = arg(False, "leave completions that were cut at --max_seq_len out of the loss")
    ptx_coef: float = arg(0.0, "loss = (1 - ptx_coef) x policy loss + ptx_coef x language-model loss of --ptx_dataset")
    disable_loss_mask: bool = arg(False, "refused: the loss would also cover tokens that the policy did not choose")

    def __post_init__(self) -> None:
        for name, accepted in (
            ("loss", LOSSES),
            ("advantage", (*ADVANTAGES, None)),
            ("aggregation", (*AGGREGATIONS, None)),
            ("kl_kind", KL_KINDS),
            ("importance", ("auto", *IMPORTANCE_KINDS)),
        ):
            if getattr(self, name) not in accepted:
                raise ValueError(f"--{name} must be one of {accepted}, got {getattr(self, name)!r}")
        if not 0 <= self.kl_coef < float("inf"):
            raise ValueError(f"--kl_coef must be at least 0, got {self.kl_coef}")
        if not 0 <= self.ptx_coef <= 1:
            raise ValueError(f"--ptx_coef must lie in [0, 1], got {self.ptx_coef}")
        if self.importance_cap <= 1:
            raise ValueError(f"--importance_cap must be above 1, got {self.importance_cap}")
        if self.disable_loss_mask:
            raise ValueError(
                "--disable_loss_mask: without the mask the loss covers prompts and padding, which the policy did not "
                "choose; leave it out"
            )


@dataclass(kw_only=True)
class UpdateConfig(OptimConfig):
    """The optimisation."""

    num_episodes: int = arg(100, "episodes: collect completions, then train on them", short="-n")
    num_collect_steps: int = arg(1, "collections of --experience_batch_size prompts an episode")
    num_update_steps: int = arg(1, "passes over the completions of an episode")
    train_batch_size: int = arg(8, "completions of one process in one micro-step")
    accumulation_steps: int | None = arg(
        None, "micro-steps of one optimizer step (default: all of a pass, so that one pass is one step)"
    )
    lr: float | None = arg(
        None, "peak learning rate; cosine decay to a tenth of it (default: 1e-5 for LoRA, else 1e-6)"
    )
    seed: int = arg(42, "seed of the adapter's start values, of the order of prompts and of the completions")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_episodes", "num_collect_steps", "num_update_steps", "train_batch_size"):
            at_least(self, 1, name)
        if self.accumulation_steps is not None:
            at_least(self, 1, "accumulation_steps")


@dataclass(kw_only=True)
class GRPOLoraSettings(LoraSettings):
    """The adapter."""

    lora_config: str | None = arg(None, "JSON of r, lora_alpha, lora_dropout and target_modules, in place of the flags")

    def __post_init__(self) -> None:
        if self.lora_config is not None:
            self._read(self.lora_config)
            self.lora_config = None  # its values are the flags' now, and are saved with them
        super().__post_init__()
        if self.lora_dropout:
            raise ValueError(
                f"--lora_dropout {self.lora_dropout}: the policy that is trained must be the one that answered; give 0"
            )

    def _read(self, file: str) -> None:
        flag = f"--lora_config {file}"
        try:
            values = json.loads(Path(file).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{flag}: {error}") from None
        if not isinstance(values, dict) or "r" not in values:
            raise ValueError(f"{flag}: expected a JSON object with r, lora_alpha, lora_dropout and target_modules")
        defaults = LoraSettings()
        for key, value in values.items():
            if key in _LORA_FIXED and value == _LORA_FIXED[key]:
                continue
            if key in _LORA_FIXED:
                raise ValueError(f"{flag}: {key} is {value!r}; only {_LORA_FIXED[key]!r} is supported")
            if key not in _LORA_KEYS:
                raise ValueError(f"{flag}: unknown key {key!r}; known are {', '.join([*_LORA_KEYS, *_LORA_FIXED])}")
            name = _LORA_KEYS[key]
            default = getattr(defaults, name)
            if getattr(self, name) != default:
                raise ValueError(f"--{name} and {flag} both say what {key} is; give one")
            value = [value] if name == "lora_targets" and isinstance(value, str) else value
            kind = (int, float) if isinstance(default, float) else type(default)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ValueError(f"{flag}: {key} is {value!r}; expected {type(default).__name__}")
            setattr(self, name, value)


@dataclass(kw_only=True)
class GRPOOutputConfig(OutputConfig):
    """Where results go."""

    save_dir: str = arg(
        "actor_checkpoint_prompts", "directory of the run; the adapter goes to its folder lora, a model to model"
    )
    save_interval: int = arg(0, "save the state of the training every so many episodes; 0: only when asked to stop")
    log_samples_interval: int = arg(
        10, "write and show a table of completions of the first episode and every so many; 0: never"
    )
    use_wandb: bool = arg(False, "also send what TensorBoard gets to Weights & Biases (the package wandb)")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 0, "log_samples_interval")


@dataclass(kw_only=True)
class GRPOConfig:
    """All of `applications/train_grpo.py`."""

    ALIASES: ClassVar[dict[str, str]] = {
        "pretrain": "pretrained",
        "save_path": "save_dir",
        "log_dir": "tensorboard_dir",
        "checkpoint_path": "resume",
        "grad_checkpoint": "use_grad_checkpoint",
    }
    """ColossalChat's spelling -> ours; both are flags and keys of a recipe."""

    pretrained: str = arg(dataclasses.MISSING, "Hugging Face directory of the model to train", short="-m")
    data: PromptConfig
    rollout: RolloutConfig
    reward: RewardConfig
    policy: PolicyConfig
    train: UpdateConfig
    lora: GRPOLoraSettings
    parallel: ParallelConfig
    output: GRPOOutputConfig

    @property
    def trains_adapter(self) -> bool:
        """LoRA, or else all weights."""
        return self.lora.trains_adapter

    @property
    def most_states(self) -> int | None:
        """How many states the run saves at most."""
        every = self.output.save_interval
        return self.train.num_episodes // every if every else None

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the run."""
        return self.train.num_episodes * self.steps_per_episode

    @property
    def rows_per_episode(self) -> int:
        """Completions of one process in one episode."""
        return self.train.num_collect_steps * self.rollout.experience_batch_size * self.rollout.num_generations

    @property
    def steps_per_episode(self) -> int:
        """Optimizer steps of one episode."""
        rows = self.train.train_batch_size * (self.train.accumulation_steps or self.rows_per_episode)
        return self.train.num_update_steps * -(-self.rows_per_episode // rows)

    def __post_init__(self) -> None:
        self._check_layout()
        if self.policy.kl_coef and not self.trains_adapter:
            raise ValueError(
                f"--kl_coef {self.policy.kl_coef}: the reference is the model without its adapter, and --lora_rank 0 "
                "trains all weights; use LoRA, or --kl_coef 0"
            )
        if bool(self.policy.ptx_coef) != bool(self.data.ptx_dataset):
            raise ValueError("--ptx_coef above 0 and --ptx_dataset go together")
        if self.policy.loss == "rloo" and self.steps_per_episode > 1:
            raise ValueError(
                f"--loss rloo is right for one optimizer step an episode, and here are {self.steps_per_episode}: leave "
                "out --accumulation_steps and --num_update_steps, or use another loss"
            )
        if self.train.lr is None:
            self.train.lr = 1e-5 if self.trains_adapter else 1e-6

    def _check_layout(self) -> None:
        parallel = self.parallel
        if parallel.pp > 1:
            raise ValueError(f"--pp {parallel.pp}: completions cannot be drawn over pipeline stages; use --pp 1")
        if parallel.enable_sequence_parallelism:
            raise ValueError(
                "--enable_sequence_parallelism: completions cannot be drawn from parts of rows; leave it out"
            )
        if parallel.plugin.startswith("gemini"):
            raise ValueError(
                f"--plugin {parallel.plugin} shares out every weight, and completions cannot be drawn so; use zero2, "
                "zero2_cpu, ddp, moe or 3d"
            )
