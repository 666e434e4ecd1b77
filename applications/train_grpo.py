"""GRPO with verifiable rewards: draw completions, grade them, train on what made some better than others.

    colossalai run --nproc_per_node 8 applications/train_grpo.py --pretrain MODEL \\
        --prompt_dataset PROMPTS.jsonl --reward_functions number --plugin zero2 --lora_rank 32

Also runs without a launcher, on one process. `--help` lists the flags, which are those of ColossalChat's script.
"""

from coati_ext.cli import parse_config
from coati_ext.grpo_config import GRPOConfig
from coati_ext.utils.launch import launch, run_command
from coati_ext.utils.preflight import check_grpo


def main() -> None:
    run_command(lambda: train(parse_config(GRPOConfig, __doc__.partition("\n")[0])))


def train(config: GRPOConfig) -> None:
    check_grpo(config)  # before anything heavy is imported

    from coati_ext import compat

    compat.apply()  # mends colossalai for this stack, so it comes before it
    from colossalai.booster import Booster

    from coati_ext.checkpoint_io.adapter import frozen_router_hash
    from coati_ext.models.completion_log_probs import disable_dropout
    from coati_ext.plugin import build_plugin
    from coati_ext.trainer import grpo_result, grpo_setup, setup
    from coati_ext.trainer.checks import check_start
    from coati_ext.trainer.grpo_data import load_data

    launch(seed=config.train.seed)
    plugin = build_plugin(config.parallel, config.train)
    booster = Booster(plugin=plugin)
    part = setup.describe_model(config, plugin)
    grpo_setup.check_reward_names(config)
    lora = check_start(config, plugin, part)  # before anything is tokenised and any weight read
    tokenizer = grpo_setup.load_grpo_tokenizer(config)
    setup.prepare_run(config)

    data = load_data(config, plugin, tokenizer)
    reward_model = grpo_setup.make_reward_model(config, data.template)
    grpo_setup.check_golds(config, reward_model, data)
    config = setup.with_defaults(config, plugin, config.num_steps)
    setup.save_config(config)

    setup.load_model(config, plugin, part)
    setup.choose_trained(config, booster, part, lora)
    disable_dropout(part)
    optimizer, lr_scheduler = setup.make_optimizer(config, part, config.num_steps)
    model, optimizer, *_ = booster.boost(part, optimizer, lr_scheduler=lr_scheduler)
    router_before = frozen_router_hash(part) if config.trains_adapter else None
    trainer = grpo_setup.make_trainer(config, booster, model, optimizer, lr_scheduler, tokenizer, reward_model, data)
    evaluation = grpo_setup.make_evaluation(config, trainer, data)
    summary = grpo_setup.fit(config, trainer, evaluation, data)
    if summary["stopped"]:
        return
    setup.check_training(trainer)
    if config.trains_adapter:
        setup.check_router(router_before, frozen_router_hash(part))
    summary = grpo_result.summarise(config, summary)
    setup.save(
        config,
        booster,
        model,
        tokenizer,
        card=grpo_result.grpo_card(config, summary),
        skipped=summary["skipped"],
        result=grpo_result.grpo_result(config, summary),
    )
    grpo_result.write_summary(config, summary)


if __name__ == "__main__":
    main()
