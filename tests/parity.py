"""One optimizer step or a short run under a layout, and the same on plain PyTorch: what the parity tests compare.

The functions here are executed on every rank of a pool. The reference knows no plugin, no process group and no
micro-batch: all samples in one batch, one backward.
"""

import torch
import torch.distributed as dist
from peft import LoraConfig
from tiny_models import VOCAB, tiny_model
from torch import nn

NUM_SAMPLES = 8


def samples() -> list[dict[str, torch.Tensor]]:
    """Eight samples of unlike lengths and supervised counts; one asks for nothing."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for length, prompt in [(9, 4), (5, 1), (12, 10), (7, 2), (3, 1), (6, 6), (11, 3), (8, 5)]:
        ids = torch.randint(3, VOCAB, (length,), generator=generator)
        labels = ids.clone()
        labels[:prompt] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def collate(chosen: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pad = nn.utils.rnn.pad_sequence
    ids = pad([s["input_ids"] for s in chosen], batch_first=True)
    lengths = torch.tensor([len(s["input_ids"]) for s in chosen])
    return {
        "input_ids": ids,
        "attention_mask": (torch.arange(ids.shape[1])[None] < lengths[:, None]).long(),
        "labels": pad([s["labels"] for s in chosen], batch_first=True, padding_value=-100),
    }


def my_micro_batches(
    dp_rank: int, dp_size: int, accumulation_steps: int, packing: bool
) -> list[dict[str, torch.Tensor]]:
    from coati_ext.dataset.packing import PackedCollator

    put_together = PackedCollator(0, max_length=20) if packing else collate
    mine = samples()[dp_rank::dp_size]
    size = len(mine) // accumulation_steps
    return [put_together(mine[i * size : (i + 1) * size]) for i in range(accumulation_steps)]


def lora_config(targets: list[str]) -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")


def randomise_lora_B(model: nn.Module) -> None:
    """Values by name and expert, so that every layout starts from the same adapter and lora_A gets a gradient."""
    from coati_ext.moe import MoeExperts

    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, MoeExperts):
                for projection, weight in module.lora_B.items():
                    for local in range(module.num_local_experts):
                        _fill(weight[local], f"{name}.{projection}.{module.first_expert + local}")
        for name, parameter in model.named_parameters():
            if "lora_B.default" in name:
                _fill(parameter, name)


def _fill(tensor: torch.Tensor, name: str) -> None:
    import zlib

    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    cut = getattr(tensor, "tp_cut", None)
    if cut is None:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
        return
    shape = [cut.full if dim == cut.dim else size for dim, size in enumerate(tensor.shape)]
    tensor.copy_((torch.randn(shape, generator=generator) * 0.2).narrow(cut.dim, cut.start, cut.stop - cut.start))


def starve(model: nn.Module, num_used: int | None) -> None:
    """Send all tokens to the first `num_used` experts, whatever the router says."""
    from coati_ext.moe import MoeExperts

    if num_used is None:
        return
    for module in model.modules():
        if isinstance(module, MoeExperts):
            module.register_forward_pre_hook(lambda _, args: (args[0], args[1] % num_used, args[2]))


def reference(
    family: str,
    targets: list[str],
    *,
    num_used: int | None,
    steps: int = 1,
    lr: float = 0.0,
    clip: float = 0.0,
    train_head: bool = False,
    model_kwargs: dict | None = None,
):
    """(losses, gradient norms, gradients of the last step) of plain SGD on one process."""
    from coati_ext.models.lora import inject_lora
    from coati_ext.models.loss import GPTLMLoss

    model = tiny_model(family, **(model_kwargs or {}))
    inject_lora(model, lora_config(targets), seed=0)
    randomise_lora_B(model)
    starve(model, num_used)
    model.get_output_embeddings().requires_grad_(train_head)
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    batch, losses, norms = collate(samples()), [], []
    for _ in range(steps):
        model.zero_grad()
        loss = GPTLMLoss()(model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits, batch["labels"])
        loss.backward()
        grads = {name: p.grad.clone() for name, p in trainable.items()}
        norm = torch.cat([g.flatten() for g in grads.values()]).norm().item()
        factor = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        with torch.no_grad():
            for p in trainable.values():
                p -= lr * factor * p.grad
        losses.append(loss.item())
        norms.append(norm)
    return losses, norms, grads


def run_layout(
    family: str,
    targets: list[str],
    ep: int,
    accumulation_steps: int,
    *,
    num_used: int | None = None,
    steps: int = 1,
    lr: float = 0.0,
    clip: float = 0.0,
    checkpointing: bool = False,
    precision: str = "fp32",
    pp: int = 1,
    tp: int = 1,
    sp: int = 1,
    sequence_parallel: bool = False,
    packing: bool = False,
    zero_stage: int = 1,
    num_layers_per_stage: list[int] | None = None,
    microbatch_size: int = 1,
    train_head: bool = False,
    model_kwargs: dict | None = None,
    plugin_kwargs: dict | None = None,
):
    """The same through MoeLoraPlugin, Booster and SFTTrainer on this rank of the pool."""
    from coati_ext import compat

    compat.apply()  # before Booster is imported
    from colossalai.booster import Booster

    from coati_ext.models.recompute import enable_recompute
    from coati_ext.plugin import MoeLoraPlugin
    from coati_ext.trainer.sft import SFTTrainer

    plugin = MoeLoraPlugin(
        ep_size=ep,
        pp_size=pp,
        tp_size=tp,
        sp_size=sp,
        enable_sequence_parallelism=sequence_parallel or sp > 1,
        sequence_parallelism_mode="all_to_all" if sp > 1 else None,
        precision=precision,
        max_norm=clip,
        zero_stage=zero_stage,
        num_layers_per_stage=num_layers_per_stage,
        **(plugin_kwargs or {}),
    )
    booster = Booster(plugin=plugin)
    whole = tiny_model(family, **(model_kwargs or {}))
    model = booster.enable_lora(whole, lora_config=lora_config(targets))
    randomise_lora_B(model)
    starve(model, num_used)
    model.get_output_embeddings().requires_grad_(train_head)
    if checkpointing:
        enable_recompute(model)
        model.train()
    inner = model
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr or 1e-12)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    model, optimizer, *_ = booster.boost(model, optimizer)
    trainer = SFTTrainer(
        booster=booster,
        model=model,
        optimizer=optimizer,
        lr_scheduler=schedule,
        dataloader=[],
        dp_group=plugin.mixed_dp_group,
        sp_group=plugin.sp_group if sp > 1 else None,
        pp_group=plugin.pp_group if pp > 1 else None,
        microbatch_size=microbatch_size,
        accumulation_steps=accumulation_steps,
    )
    dp_rank, dp_size = dist.get_rank(plugin.dp_group), dist.get_world_size(plugin.dp_group)
    batches = my_micro_batches(dp_rank, dp_size, accumulation_steps, packing)
    losses, norms, grads = [], [], {}

    upstream_step = optimizer.step

    def recording_step() -> None:
        grads.update(whole_gradients(inner, optimizer, plugin.pp_group, plugin.tp_group))
        upstream_step()

    optimizer.step = recording_step
    for _ in range(steps):
        result = trainer.train_step(batches)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    return losses, norms, grads


def whole_gradients(model: nn.Module, optimizer, pp_group, tp_group) -> dict[str, torch.Tensor]:
    """Reduced gradients by parameter name; experts' put together over the EP group, layers over the pipeline."""
    whole = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        grad = optimizer.get_param_grad(parameter)
        if grad is None and name == "no_adapter_on_this_stage":
            continue
        if hasattr(parameter, "ep_group"):
            parts = [torch.empty_like(grad) for _ in range(dist.get_world_size(parameter.ep_group))]
            dist.all_gather(parts, grad.contiguous(), group=parameter.ep_group)
            grad = torch.cat(parts)
        cut = getattr(parameter, "tp_cut", None)
        if cut is not None:
            parts = [None] * dist.get_world_size(tp_group)  # of unlike sizes
            dist.all_gather_object(parts, grad, group=tp_group)
            grad = torch.cat(parts, dim=cut.dim)
        whole[name] = grad.float().cpu()
    stages = [None] * dist.get_world_size(pp_group)
    dist.all_gather_object(stages, whole, group=pp_group)
    return {name: grad for stage in stages for name, grad in stage.items()}
