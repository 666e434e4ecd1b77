"""GRPO: collect completions, then train on them, in the same processes.

An episode is `num_collect_steps` collections and then `num_update_steps` passes over what they gave, each of one or
more optimizer steps. Each of these is a tick; a run can be stopped, and taken up, after any of them. The loss of an
optimizer step has denominators counted over all of its micro-batches and ranks (`coati_ext.models.aggregation`).
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from coati_ext.dataset.prompt_loader import PromptLoader
from coati_ext.experience_buffer import NaiveExperienceBuffer
from coati_ext.experience_maker import Completion, NaiveExperienceMaker
from coati_ext.experience_maker.scoring import RewardModels
from coati_ext.models.aggregation import Denominators
from coati_ext.models.generation import Sampling
from coati_ext.models.policy_loss import PolicyLoss
from coati_ext.moe.load import load_own_expert_load, own_expert_load, reset_expert_load
from coati_ext.trainer.base import Batch
from coati_ext.trainer.episode import episode_metrics, progress_text, warn_of_no_signal
from coati_ext.trainer.grpo_arguments import generate_settings, refuse_arguments
from coati_ext.trainer.grpo_plan import Plan, annealed_temperature, micro_batches_of, rows_of_step
from coati_ext.trainer.language_model_batches import LanguageModelBatches
from coati_ext.trainer.policy_step import PolicyStepTrainer, sum_of
from coati_ext.utils.device import peak_memory_gb
from coati_ext.utils.metric_sums import MetricSums
from coati_ext.utils.metrics import MetricsLogger

if TYPE_CHECKING:
    from colossalai.booster import Booster


class GRPOTrainer(PolicyStepTrainer):
    """ColossalChat's trainer, with its argument names.

    Args:
        actor_booster, actor, actor_optim, actor_lr_scheduler: after `booster.boost`, under a plugin of this project.
        reward_model: `RLVRRewardModel`, `RewardModel`, or several as [(model, weight), ...].
        initial_model: the reference of the KL term; None: the actor with its adapters off.
        kl_coef, kl_kind, eps_clip, clip_eps_low, clip_eps_high, dual_clip, loss, aggregation, importance,
            importance_cap: of `PolicyLoss`; `eps_clip` is both bounds.
        advantage: default: the loss's own.
        ptx_coef: loss = (1 - ptx_coef) * policy loss + ptx_coef * language-model loss.
        train_batch_size: completions of a micro-batch, on each rank.
        accumulation_steps: micro-batches of an optimizer step; None: all of a pass.
        buffer_limit, buffer_cpu_offload: of `NaiveExperienceBuffer`.
        num_generations (or num_generation), inference_batch_size, logits_forward_batch_size, mask_truncated,
            dynamic_sampling_rounds, seed: of `NaiveExperienceMaker`.
        temperature_annealing_config: see `annealed_temperature`.
        offload_inference_models: keep `initial_model` and a trained reward model in host memory while training.
        skip_nonfinite, max_skipped, save_dir: as in `StepTrainer`.
        generate_kwargs: temperature, top_p, top_k, stop_token_ids, stop_strings, max_new_tokens, min_new_tokens.
        Others of ColossalChat's arguments are accepted where they change nothing, and else refused by name.

    Raises:
        ValueError: an argument out of range, or one that is refused; says why.
    """

    def __init__(
        self,
        actor_booster: "Booster",
        actor: nn.Module,
        reward_model: RewardModels,
        initial_model: nn.Module | None,
        actor_optim: torch.optim.Optimizer,
        actor_lr_scheduler: LRScheduler,
        tokenizer: PreTrainedTokenizerBase,
        kl_coef: float = 0.0,
        ptx_coef: float = 0.0,
        train_batch_size: int = 8,
        buffer_limit: int = 0,
        buffer_cpu_offload: bool = True,
        eps_clip: float | None = None,
        vf_coef: float | None = None,
        value_clip: float | None = None,
        sample_buffer: bool = False,
        dataloader_pin_memory: bool = True,
        offload_inference_models: bool = True,
        apply_loss_mask: bool = True,
        accumulation_steps: int | None = None,
        save_interval: int = 0,
        save_dir: str | None = None,
        use_tp: bool = False,
        num_generation: int = 8,
        inference_batch_size: int | None = None,
        logits_forward_batch_size: int = 16,
        use_tts_inference: bool = False,
        temperature_annealing_config: dict[str, Any] | None = None,
        tts_config: dict[str, str] | None = None,
        coordinator: Any = None,
        callbacks: list[Any] | None = None,
        *,
        loss: str = "grpo",
        advantage: str | None = None,
        aggregation: str | None = None,
        clip_eps_low: float | None = None,
        clip_eps_high: float | None = None,
        dual_clip: float | None = None,
        kl_kind: str = "k3",
        importance: str = "auto",
        importance_cap: float = 2.0,
        mask_truncated: bool = False,
        dynamic_sampling_rounds: int = 0,
        seed: int = 42,
        skip_nonfinite: bool = False,
        max_skipped: int = 10,
        **generate_kwargs: Any,
    ) -> None:
        refuse_arguments(
            vf_coef=vf_coef,
            value_clip=value_clip,
            sample_buffer=sample_buffer,
            apply_loss_mask=apply_loss_mask,
            save_interval=save_interval,
            use_tts_inference=use_tts_inference,
            tts_config=tts_config,
            callbacks=callbacks,
        )
        self.num_generation = generate_kwargs.pop("num_generations", num_generation)
        self._sampling = generate_settings(tokenizer, generate_kwargs)
        plugin = actor_booster.plugin
        dp_group, ep_group = plugin.mixed_dp_group, plugin.ep_group
        if importance == "auto":
            cut = self._sampling.top_p < 1 or self._sampling.top_k > 0
            importance = "token_truncate" if cut else "none"
        policy_loss = PolicyLoss(
            loss=loss,
            aggregation=aggregation,
            clip_eps_low=eps_clip if clip_eps_low is None else clip_eps_low,
            clip_eps_high=eps_clip if clip_eps_high is None else clip_eps_high,
            dual_clip=dual_clip,
            kl_coef=kl_coef,
            kl_kind=kl_kind,
            importance=importance,
            importance_cap=importance_cap,
            max_length=self._sampling.max_new_tokens,
        )
        self.experience_maker = NaiveExperienceMaker(
            actor,
            reward_model,
            initial_model,
            tokenizer,
            num_generation=self.num_generation,
            inference_batch_size=inference_batch_size,
            logits_forward_batch_size=logits_forward_batch_size,
            advantage=policy_loss.kind.advantage if advantage is None else advantage,
            with_reference=kl_coef > 0,
            mask_truncated=mask_truncated,
            dynamic_sampling_rounds=dynamic_sampling_rounds,
            seed=seed,
            group=ep_group if dist.get_world_size(ep_group) > 1 else None,
            dp_group=dp_group,
            copies=plugin.tp_group if dist.get_world_size(plugin.tp_group) > 1 else None,
        )
        super().__init__(
            booster=actor_booster,
            model=actor,
            optimizer=actor_optim,
            lr_scheduler=actor_lr_scheduler,
            dp_group=dp_group,
            skip_nonfinite=skip_nonfinite,
            max_skipped=max_skipped,
            save_dir=save_dir,
            log_probs=self.experience_maker.log_probs,
            ptx_coef=ptx_coef,
            policy_loss=policy_loss,
        )
        self.buffer = NaiveExperienceBuffer(train_batch_size, buffer_limit, buffer_cpu_offload)
        self.train_batch_size, self.accumulation_steps = train_batch_size, accumulation_steps
        self.annealing, self.seed = temperature_annealing_config, seed
        self._offloaded = _movable(reward_model, initial_model) if offload_inference_models else []
        self.plan: Plan | None = None
        reset_expert_load(self.model)  # the call that tried the head is no part of a run

    # --- the run

    def prepare(
        self,
        num_episodes: int,
        num_collect_steps: int,
        num_update_steps: int,
        prompt_dataloader: PromptLoader,
        pretrain_dataloader: LanguageModelBatches | None = None,
    ) -> None:
        """What `fit` does first: set the data and the plan of the run, which a state is taken up into.

        Raises:
            ValueError: `ptx_coef` without batches for it, or batches without `ptx_coef`.
            TypeError: another loader of prompts.
        """
        if not hasattr(getattr(prompt_dataloader, "sampler", None), "num_prompts"):
            kind = type(prompt_dataloader).__name__
            raise TypeError(f"prompt_dataloader is a {kind}; expected a coati_ext.dataset.PromptLoader")
        if bool(self.ptx_coef) != (pretrain_dataloader is not None):
            raise ValueError(f"ptx_coef is {self.ptx_coef}: above 0 and pretrain_dataloader go together")
        self.prompts, self.language_model_batches = prompt_dataloader, pretrain_dataloader
        rows = num_collect_steps * prompt_dataloader.sampler.num_prompts * self.num_generation
        rows = min(rows, self.buffer.limit or rows)
        per_step = self.train_batch_size * (self.accumulation_steps or rows)
        self.plan = Plan(
            num_episodes=num_episodes,
            num_collect_steps=num_collect_steps,
            num_update_steps=num_update_steps,
            steps_per_pass=-(-rows // per_step),
        )
        # With one optimizer step an episode, the policy of that step is the old one.
        self.experience_maker.with_old_log_probs = self.plan.steps_per_episode > 1

    @property
    def num_steps(self) -> int:
        """Ticks of the run."""
        return self.plan.num_episodes * self.plan.ticks_per_episode

    @property
    def episode(self) -> int:
        """Episodes that are complete."""
        return self.step // self.plan.ticks_per_episode

    @property
    def is_on_policy(self) -> bool:
        """In the first optimizer step of an episode."""
        return self.step % self.plan.ticks_per_episode == self.plan.num_collect_steps

    @property
    def temperature(self) -> float:
        """Of the episode that `step` is in."""
        if self.annealing is None:
            return self._sampling.temperature
        return annealed_temperature(self.annealing, self.episode, self.plan.num_episodes)

    def fit(
        self,
        num_episodes: int,
        num_collect_steps: int,
        num_update_steps: int,
        prompt_dataloader: PromptLoader,
        pretrain_dataloader: LanguageModelBatches | None = None,
        logger: MetricsLogger | None = None,
        *,
        show_progress: bool = True,
        after_episode: Callable[["GRPOTrainer"], dict[str, float]] = lambda trainer: {},
        after_tick: Callable[["GRPOTrainer"], bool] = lambda trainer: False,
    ) -> None:
        """The ticks that are left: all, unless a state was taken up.

        Args:
            after_episode: gives more metrics of the episode, such as an evaluation's.
            after_tick: training ends early where it returns true (on every rank alike).

        Raises:
            ValueError: a step that is not finite, `max_skipped` of them in a row, or an error of a rollout.
        """
        self.prepare(num_episodes, num_collect_steps, num_update_steps, prompt_dataloader, pretrain_dataloader)
        self.model.train()
        bar = tqdm(
            total=self.plan.num_episodes,
            initial=self.episode,
            desc="GRPO",
            unit="episode",
            disable=not show_progress,
            dynamic_ncols=True,
        )
        with bar:
            while self.step < self.num_steps:
                tick = self.step % self.plan.ticks_per_episode
                if tick < self.plan.num_collect_steps:
                    self._collect()
                else:
                    self._update(tick - self.plan.num_collect_steps)
                is_last = tick == self.plan.ticks_per_episode - 1
                metrics = self._end_episode() if is_last else {}
                self.step += 1
                if is_last:
                    metrics |= after_episode(self)
                    if logger is not None:
                        logger.log(self.episode, metrics)
                    bar.set_postfix_str(progress_text(metrics), refresh=False)
                    bar.update()
                if after_tick(self):
                    break

    # --- a tick

    def _collect(self) -> None:
        self._move_inference_models(self.device)
        rollout = self.experience_maker.rollout
        rollout.seconds, rollout.num_tokens = dict.fromkeys(rollout.seconds, 0.0), 0
        experience, metrics = self.experience_maker.make_experience(
            self.prompts.next, self.prompts.sampler.num_prompts, self.sampling
        )
        self.buffer.append(experience)
        self.sums.add(metrics)
        self.sums.add({f"seconds/{phase}": sum_of(seconds) for phase, seconds in rollout.seconds.items()})
        self.sums.add({"tokens/generate": sum_of(rollout.num_tokens)})
        self._move_inference_models("cpu")

    @property
    def sampling(self) -> Sampling:
        """How the completions of this episode are drawn."""
        return replace(self._sampling, temperature=self.temperature)

    def _update(self, index: int) -> None:
        """One optimizer step: step `index % steps_per_pass` of pass `index // steps_per_pass`."""
        start = time.perf_counter()
        number_of_pass, number = divmod(index, self.plan.steps_per_pass)
        per_step = self.train_batch_size * (self.accumulation_steps or len(self.buffer))
        seed = f"{self.seed}/{self.episode}/{number_of_pass}"
        rows = rows_of_step(self.buffer.lengths(), per_step, number, seed)
        # Without a KL term, rows that have no advantage have no gradient: they count, and are not computed.
        micro_batches = micro_batches_of(
            self.buffer, rows, self.device, self.dp_group, only_taught=self.policy_loss.kl_coef == 0
        )
        denominators = Denominators.of([self.buffer.kept.action_mask[rows].to(self.device)])
        num_idle = self.num_idle
        self.train_step(micro_batches, self._next_language_model_batches(), denominators)
        num_tokens = sum(int(batch.attention_mask.sum()) for batch in micro_batches) * (self.num_idle == num_idle)
        self.sums.add(
            {"seconds/train": sum_of(time.perf_counter() - start), "tokens/train": sum_of(num_tokens)},
        )

    def _next_language_model_batches(self) -> list[Batch]:
        if self.language_model_batches is None:
            return []
        per_step = self.accumulation_steps or 1
        return self.language_model_batches.take(self.num_updates * per_step, per_step, self.device)

    # --- the end of an episode

    def _end_episode(self) -> dict[str, float]:
        """The metrics of the episode, alike on all ranks.

        Raises:
            ValueError: see `warn_of_no_signal`.
        """
        metrics = episode_metrics(
            self.sums.reduce(self.dp_group),
            num_ranks=dist.get_world_size(self.dp_group),
            num_steps=self.plan.steps_per_episode,
        )
        metrics["learning_rate"] = self.lr_scheduler.get_last_lr()[0]
        metrics["temperature"] = self.temperature
        metrics["memory_gb"] = peak_memory_gb()
        metrics |= self._expert_load()
        self.buffer.clear()
        self.sums = MetricSums()
        if metrics["signals"] == 0:
            hidden = self.experience_maker.mask_truncated
            warn_of_no_signal(metrics, self.episode + 1, has_learnt=self.has_learnt, mask_truncated=hidden)
        return metrics

    @property
    def samples(self) -> list[Completion]:
        """This rank's completions of the last collection."""
        return self.experience_maker.samples

    def _move_inference_models(self, device: torch.device | str) -> None:
        for model in self._offloaded:
            model.to(device)

    # --- what a continuation takes up

    LENGTH_FLAGS = "--num_episodes"

    def amount(self, step: int) -> str:
        episodes, ticks = divmod(step, self.plan.ticks_per_episode)
        return f"{episodes} episode{'s' * (episodes != 1)}" + (
            f" and {ticks} of {self.plan.ticks_per_episode} steps" if ticks else ""
        )

    @property
    def resumes_with(self) -> dict[str, tuple[Any, str]]:
        plan, sampler = self.plan, self.prompts.sampler
        return {
            "prompts a collection": (
                sampler.num_prompts * sampler.dp_size,
                "--experience_batch_size x data-parallel ranks",
            ),
            "completions a prompt": (self.num_generation, "--num_generations"),
            "collections an episode": (plan.num_collect_steps, "--num_collect_steps"),
            "optimizer steps an episode": (
                plan.steps_per_episode,
                "--num_update_steps, --train_batch_size and --accumulation_steps",
            ),
        }

    def shared_state(self) -> dict[str, Any]:
        return {**super().shared_state(), "prompts": self.prompts.sampler.state_dict()}

    def load_shared_state(self, state: dict[str, Any]) -> None:
        super().load_shared_state(state)
        self.prompts.sampler.load_state_dict(state["prompts"])

    def rank_state(self) -> dict[str, Any]:
        return {
            "buffer": self.buffer.state(),
            "metrics": self.sums.state(),
            "expert_load": own_expert_load(self.model),
            "samples": [completion.state() for completion in self.samples] if len(self.buffer) else [],
        }

    def load_rank_state(self, state: dict[str, Any] | None) -> None:
        """
        Raises:
            ValueError: ranks of another number, in the middle of an episode.
        """
        if state is not None:
            self.buffer.load_state(state["buffer"])
            self.sums.load_state(state["metrics"])
            load_own_expert_load(self.model, state["expert_load"])
            self.experience_maker.samples = [Completion.of_state(sample) for sample in state["samples"]]
        elif self.step % self.plan.ticks_per_episode:
            raise ValueError(
                f"--resume: the state is of the middle of episode {self.episode + 1}, with completions of each rank: "
                "go on with the number of processes that it was saved with"
            )


def _movable(reward_model: RewardModels, initial_model: nn.Module | None) -> list[Any]:
    models = [model for model, _ in reward_model] if isinstance(reward_model, list | tuple) else [reward_model]
    return [model for model in (*models, initial_model) if hasattr(model, "to")]
