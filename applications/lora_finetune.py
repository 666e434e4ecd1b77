"""LoRA or full fine-tuning of (mixture-of-experts) models: read a JSONL of conversations, train, export.

    colossalai run --nproc_per_node 8 applications/lora_finetune.py \\
        --pretrained MODEL --dataset DATA.jsonl --plugin moe --ep 8 --lora_rank 8

Also runs without a launcher, on one process. `--help` lists the flags, which are those of ColossalAI's script.
"""

from coati_ext.cli import parse_config
from coati_ext.config import FinetuneConfig
from coati_ext.utils.launch import launch, run_command
from coati_ext.utils.preflight import check_finetune


def main() -> None:
    run_command(lambda: finetune(parse_config(FinetuneConfig, __doc__.partition("\n")[0])))


def finetune(config: FinetuneConfig) -> None:
    check_finetune(config)  # before anything heavy is imported

    from coati_ext import compat

    compat.apply()  # mends colossalai for this stack, so it comes before it
    from colossalai.booster import Booster

    from coati_ext.checkpoint_io.adapter import frozen_router_hash
    from coati_ext.plugin import build_plugin
    from coati_ext.trainer import setup
    from coati_ext.trainer.checks import check_start
    from coati_ext.trainer.sft import SFTTrainer

    launch(seed=config.train.seed)
    plugin = build_plugin(config.parallel, config.train, accumulates=config.train.accumulation_steps > 1)
    booster = Booster(plugin=plugin)
    part = setup.describe_model(config, plugin)
    lora = check_start(config, plugin, part)  # before anything is tokenised and any weight read
    tokenizer = setup.load_tokenizer(config.pretrained)
    setup.prepare_run(config)

    dataset = setup.load_dataset(config, tokenizer)
    dataloader = setup.make_dataloader(config, dataset, tokenizer, plugin.dp_group)
    config, num_steps = setup.resolve_config(config, plugin, len(dataloader))
    setup.save_config(config)

    setup.load_model(config, plugin, part)
    setup.check_packing(config, part)
    setup.choose_trained(config, booster, part, lora)
    setup.compile_model(config, part)
    optimizer, lr_scheduler = setup.make_optimizer(config, part, num_steps)
    model, optimizer, *_ = booster.boost(part, optimizer, lr_scheduler=lr_scheduler)
    router_before = frozen_router_hash(part) if config.trains_adapter else None
    trainer = SFTTrainer(
        booster=booster,
        model=model,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        dataloader=dataloader,
        dp_group=plugin.mixed_dp_group,
        sp_group=plugin.sp_group if config.parallel.sp > 1 else None,
        pp_group=plugin.pp_group if config.parallel.pp > 1 else None,
        microbatch_size=config.parallel.microbatch_size,
        num_epochs=config.train.num_epochs,
        accumulation_steps=config.train.accumulation_steps,
        max_steps=config.train.max_steps,
        skip_nonfinite=config.train.skip_nonfinite,
        max_skipped=config.train.max_skipped,
        save_dir=config.output.save_dir,
    )
    summary = setup.fit(config, trainer, dataset)
    if summary["stopped"]:
        return
    setup.check_training(trainer)
    if config.trains_adapter:
        setup.check_router(router_before, frozen_router_hash(part))
    setup.save(
        config,
        booster,
        model,
        tokenizer,
        card=setup.sft_card(config, summary),
        skipped=summary["skipped"],
        result=setup.sft_result(summary),
    )


if __name__ == "__main__":
    main()
