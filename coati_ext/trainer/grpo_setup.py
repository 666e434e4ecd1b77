"""The steps of a GRPO command between its flags and its trainer, beside those that fine-tuning has too."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase

from coati_ext.config import flatten_config
from coati_ext.dataset.conversation_template import ConversationTemplate
from coati_ext.experience_maker.rollout import Completion, Rollout
from coati_ext.experience_maker.scoring import RewardModels, score_completions
from coati_ext.grpo_config import GRPOConfig
from coati_ext.models.decode_graph import can_capture
from coati_ext.models.generation import causal_lm
from coati_ext.models.reward import RewardModel, RLVRRewardModel
from coati_ext.models.reward_score import REWARDS, find_reward
from coati_ext.trainer.evaluation import Evaluation
from coati_ext.trainer.grpo import GRPOTrainer
from coati_ext.trainer.grpo_data import Data
from coati_ext.trainer.setup import begin, load_tokenizer, skipped_steps
from coati_ext.trainer.state import StateKeeper
from coati_ext.utils.collective import errors_everywhere, rank_and_size
from coati_ext.utils.launch import print_rank_0
from coati_ext.utils.metrics import MetricsLogger
from coati_ext.utils.preflight import tensorboard_path
from coati_ext.utils.report import SampleRow, SamplesLog, format_samples
from coati_ext.utils.run_directory import METRICS_FILE, SAMPLES_FILE

if TYPE_CHECKING:
    from colossalai.booster import Booster

_SHOWN_SAMPLES = 4
_CHECKED_GOLDS = 64
_SHARES = ("accuracy", "pass", "mean", "truncated", "unscored")  # what is told in percent


def load_grpo_tokenizer(config: GRPOConfig) -> PreTrainedTokenizerBase:
    if config.data.tokenizer_dir is None:
        return load_tokenizer(config.pretrained)
    return load_tokenizer(config.data.tokenizer_dir, "--tokenizer_dir")


def check_reward_names(config: GRPOConfig) -> None:
    """
    Raises:
        ValueError: there is no such reward; names the flag.
    """
    for name in config.reward.reward_functions:
        try:
            find_reward(name)
        except ValueError as error:
            raise ValueError(f"--reward_functions: {error}") from error


def make_reward_model(config: GRPOConfig, template: ConversationTemplate) -> RewardModels:
    """The rewards of the flags. A completion's limit is the `max_length` of those that ask for one.

    Raises:
        ValueError: an unknown reward or setting, or a directory without a reward model; names the flag.
    """
    asked, models = config.reward, []
    if asked.reward_functions:
        settings = {"tags": template.response_format_tags or None, **asked.options()}
        if "overlong" in asked.reward_functions:
            settings.setdefault("max_length", config.data.max_seq_len)
        try:
            found = RLVRRewardModel(asked.reward_functions, weights=asked.reward_weights, **settings)
        except ValueError as error:
            raise ValueError(f"--reward_functions: {error}") from error
        models.append((found, 1.0))
    if asked.rm_pretrain is not None:
        try:
            found = RewardModel(
                asked.rm_pretrain,
                checkpoint=asked.rm_checkpoint_path,
                batch_size=config.rollout.logits_forward_batch_size,
                max_length=config.data.max_length,
            )
        except ValueError as error:
            raise ValueError(f"--rm_pretrain: {error}") from error
        models.append((found, asked.rm_weight))
    return models[0][0] if len(models) == 1 and models[0][1] == 1.0 else models


def check_golds(config: GRPOConfig, reward_model: RewardModels, data: Data) -> None:
    """Read the first golds with the rewards of this project, before anything is drawn; a collective.

    Raises:
        ValueError: they can read none of them, or a prompt lacks what a reward needs.
    """
    names = config.reward.reward_functions
    own = bool(names) and set(names) <= REWARDS.keys()  # another function may cost anything
    with errors_everywhere(dist.group.WORLD):
        if own and dist.get_rank() == 0:
            rewards = reward_model[0][0] if isinstance(reward_model, list) else reward_model
            for dataset in filter(None, (data.prompts.dataset, data.held_out)):
                _read_golds(names, rewards, [dataset[i] for i in range(min(_CHECKED_GOLDS, len(dataset)))])


def _read_golds(names: list[str], rewards: RLVRRewardModel, prompts: list[dict[str, Any]]) -> None:
    num = len(prompts)
    try:
        scores = score_completions(rewards, prompts, [""] * num, [False] * num, [0] * num)
    except RuntimeError as error:
        raise ValueError(f"--reward_functions: {error}") from error
    unread = [p for p, score in zip(prompts, scores, strict=True) if score.reason == "gold_unparseable"]
    if not unread:
        return
    first = unread[0]
    text = (
        f"--reward_functions {' '.join(names)} cannot read the gt_answer of {len(unread)} of the first {num} prompts "
        f"({first['source']}: {first['gt_answer']!r})"
    )
    if len(unread) == num:
        raise ValueError(text)
    print_rank_0(f"warning: {text}; their completions are left out of training")


def make_trainer(
    config: GRPOConfig,
    booster: "Booster",
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    lr_scheduler: LRScheduler,
    tokenizer: PreTrainedTokenizerBase,
    reward_model: RewardModels,
    data: Data,
    *,
    min_new_tokens: int = 0,
) -> GRPOTrainer:
    """The trainer, with its plan made: `fit` or a state to resume from may follow."""
    rollout, policy, train = config.rollout, config.policy, config.train
    trainer = GRPOTrainer(
        booster,
        model,
        reward_model,
        None,
        optimizer,
        lr_scheduler,
        tokenizer,
        kl_coef=policy.kl_coef,
        ptx_coef=policy.ptx_coef,
        train_batch_size=train.train_batch_size,
        accumulation_steps=train.accumulation_steps,
        save_dir=config.output.save_dir,
        inference_batch_size=rollout.inference_batch_size,
        logits_forward_batch_size=rollout.logits_forward_batch_size,
        temperature_annealing_config={
            "start_temperature": rollout.initial_temperature,
            "end_temperature": rollout.final_temperature,
        },
        loss=policy.loss,
        advantage=policy.advantage,
        aggregation=policy.aggregation,
        clip_eps_low=policy.clip_eps_low,
        clip_eps_high=policy.clip_eps_high,
        dual_clip=policy.dual_clip,
        kl_kind=policy.kl_kind,
        importance=policy.importance,
        importance_cap=policy.importance_cap,
        mask_truncated=policy.mask_truncated,
        dynamic_sampling_rounds=rollout.dynamic_sampling_rounds,
        seed=train.seed,
        skip_nonfinite=train.skip_nonfinite,
        max_skipped=train.max_skipped,
        num_generations=rollout.num_generations,
        temperature=rollout.initial_temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_new_tokens=config.data.max_seq_len,
        min_new_tokens=min_new_tokens,
        stop_token_ids=data.template.stop_ids,
        stop_strings=rollout.stop_strings,
    )
    trainer.prepare(*_plan(config), data.prompts, data.language_model_batches)
    return trainer


def _plan(config: GRPOConfig) -> tuple[int, int, int]:
    return config.train.num_episodes, config.train.num_collect_steps, config.train.num_update_steps


def make_evaluation(config: GRPOConfig, trainer: GRPOTrainer, data: Data) -> Evaluation | None:
    if not data.held_out:
        return None
    own = trainer.experience_maker.rollout
    rollout = Rollout(
        own.actor,
        own.reward_model,
        own.tokenizer,
        inference_batch_size=config.rollout.inference_batch_size,
        seed=config.train.seed,
        group=own.group,
        copies=own.copies,
    )
    dp_rank, dp_size = rank_and_size(trainer.dp_group)
    return Evaluation(
        rollout, data.held_out, trainer.sampling, config.data.eval_samples, dp_rank=dp_rank, dp_size=dp_size
    )


def fit(config: GRPOConfig, trainer: GRPOTrainer, evaluation: Evaluation | None, data: Data) -> dict[str, Any]:
    """Train, from the state of `--resume` on, with evaluations before, during and after; returns the summary."""
    main, output = dist.get_rank() == 0, config.output
    save_dir = Path(output.save_dir)
    keeper = StateKeeper(
        trainer,
        save_dir=save_dir,
        settings=flatten_config(config),
        data_fingerprint=data.prompts.sampler.fingerprint,
        save_interval=output.save_interval * trainer.plan.ticks_per_episode,
        keep_last=output.keep_last,
    )
    _tell_decoding(trainer.experience_maker.rollout)
    begin(keeper, output.resume, save_dir, (METRICS_FILE, SAMPLES_FILE), lambda: trainer.episode)
    logger = MetricsLogger(
        tensorboard_path(output),
        save_dir / METRICS_FILE,
        enabled=main,
        first_step=trainer.episode + 1,
        wandb_settings=flatten_config(config) if output.use_wandb else None,
    )
    samples = SamplesLog(
        save_dir / SAMPLES_FILE,
        interval=output.log_samples_interval,
        last_step=config.train.num_episodes,
        enabled=main,
    )

    def evaluate(title: str) -> dict[str, float]:
        found = evaluation(trainer.dp_group)
        print_rank_0(f"{title}: {_evaluation_text(found)}, on {evaluation.num_prompts} held-out prompts")
        return found

    def after_episode(trainer: GRPOTrainer) -> dict[str, float]:
        if main and samples.due(trainer.episode):
            rows = [_sample_row(completion) for completion in trainer.samples]
            samples.add(trainer.episode, rows)
            print_rank_0(
                f"\nepisode {trainer.episode}, some of its completions:", format_samples(rows[:_SHOWN_SAMPLES])
            )
        every, is_last = config.data.eval_interval, trainer.episode == config.train.num_episodes
        due = evaluation is not None and (is_last or (every and trainer.episode % every == 0))
        return evaluate(f"\nepisode {trainer.episode}") if due else {}

    try:
        if evaluation is not None and trainer.step == 0:
            print_rank_0(f"evaluating on {evaluation.num_prompts} held-out prompts, before training")
            logger.log(0, evaluate("before training"))
        with keeper:
            trainer.fit(
                *_plan(config),
                data.prompts,
                data.language_model_batches,
                logger,
                show_progress=main,
                after_episode=after_episode,
                after_tick=keeper.after_step,
            )
    finally:
        logger.close()
        samples.close()
    return {
        "stopped": keeper.stopped_by is not None,
        "episodes": trainer.episode,
        "steps": trainer.num_updates,
        "seconds": round(keeper.seconds, 1),
        "skipped": skipped_steps(trainer),
    }


def _tell_decoding(rollout: Rollout) -> None:
    """On a GPU: whether the steps are CUDA graphs, without which small models decode several times slower."""
    if torch.cuda.is_available():
        graphs, reason = can_capture(causal_lm(rollout.actor), group=rollout.group)
        print_rank_0("decoding with CUDA graphs" if graphs else f"decoding without CUDA graphs: {reason}")


def _evaluation_text(metrics: dict[str, float]) -> str:
    shown = {name.partition("/")[2]: value for name, value in metrics.items()}
    if not shown["unscored"]:
        del shown["unscored"]
    return ", ".join(
        f"{name} {value:.1%}" if name.startswith(_SHARES) else f"{name} {value:.2f}" for name, value in shown.items()
    )


def _sample_row(completion: Completion) -> SampleRow:
    return SampleRow(
        prompt=completion.prompt["text"],
        completion=completion.text,
        gold=completion.prompt["gt_answer"],
        reward=completion.score.score,
        accuracy=completion.score.accuracy,
        reason=completion.score.reason,
        length=len(completion.ids),
        truncated=completion.truncated,
        parts=completion.score.parts,
    )
