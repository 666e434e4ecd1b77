"""What a run is made of: keyword-only dataclasses, one place per default, importable without torch.

A field's name is its flag and its key in a recipe. Flags keep the spelling, meaning and default of ColossalAI's
`lora_finetune.py`; what differs says so in its help.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

PLUGINS = ("gemini", "gemini_auto", "zero2", "zero2_cpu", "3d", "ddp", "moe")
SP_MODES = ("split_gather", "ring", "all_to_all")
PRECISIONS = ("bf16", "fp16", "fp32")
FROZEN_DTYPES = ("fp8",)


def arg(
    default: Any, help: str, *, short: str | None = None, choices: tuple | None = None, many: type | None = None
) -> Any:
    """A dataclass field that is also a flag; `dataclasses.MISSING` as the default makes it required.

    Args:
        many: the type of the values of a flag that takes several.
    """
    metadata = {"help": help, "short": short, "choices": choices, "many": many}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(kw_only=True)
class DataConfig:
    """What is trained on."""

    dataset: str = arg(dataclasses.MISSING, "JSONL of conversations to train on", short="-d")
    max_length: int = arg(8192, "cut samples to this many tokens")
    packing: bool = arg(
        False, "put the samples of a micro-batch end to end in rows of --max_length tokens at most: less padding"
    )
    skip_bad_lines: bool = arg(False, "count broken lines and go on instead of stopping at the first")

    def __post_init__(self) -> None:
        at_least(self, 2, "max_length")


@dataclass(kw_only=True)
class LoraSettings:
    """The adapter."""

    lora_rank: int = arg(0, "rank of the adapter; 0, ColossalAI's default, trains all weights")
    lora_alpha: int = arg(8, "scaling is lora_alpha / lora_rank")
    lora_targets: list[str] = arg(
        ["mlp"],
        "what to adapt: mlp (gate, up, down of routed experts, shared experts and dense MLPs), experts, "
        "shared_experts, dense_mlp, attention, all (or all-linear, PEFT's word for it; the router stays frozen), a "
        "projection's name, a path's end, or a regular expression for whole paths",
        many=str,
    )
    lora_dropout: float = arg(0.0, "dropout before lora_A")
    init_adapter: str | None = arg(None, "start from this PEFT adapter, ours or another tool's per-expert one")
    frozen_dtype: str | None = arg(
        None,
        "fp8: frozen weights that are FP8 in the checkpoint stay so, at half the memory (default: all are dequantised)",
        choices=FROZEN_DTYPES,
    )
    fp8_compute: bool = arg(
        False,
        "with --frozen_dtype fp8: forward products round their rows to FP8 as well, which changes a layer's output by "
        "some 4%% of its norm; the backward pass stays in 16 bits",
    )

    def __post_init__(self) -> None:
        _one_of(self, "frozen_dtype", (*FROZEN_DTYPES, None))
        if self.frozen_dtype is not None and not self.trains_adapter:
            raise ValueError(f"--frozen_dtype {self.frozen_dtype} needs LoRA: --lora_rank 0 trains all weights")
        if self.fp8_compute and self.frozen_dtype is None:
            raise ValueError("--fp8_compute multiplies weights that are kept in FP8: it needs --frozen_dtype fp8")
        at_least(self, 0, "lora_rank")
        at_least(self, 1, "lora_alpha")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"--lora_dropout must lie in [0, 1), got {self.lora_dropout}")
        if not self.lora_targets:
            raise ValueError("--lora_targets is empty; the default is mlp")

    @property
    def trains_adapter(self) -> bool:
        return self.lora_rank > 0 or self.init_adapter is not None


@dataclass(kw_only=True)
class ParallelConfig:
    """How the model is spread over the processes."""

    plugin: str = arg(
        "zero2",
        "how to parallelise: moe and 3d take all the sizes below; zero2, zero2_cpu (states in host memory) and ddp are "
        "data parallel; gemini and gemini_auto are for full fine-tuning on GPUs",
        short="-p",
        choices=PLUGINS,
    )
    tp: int = arg(1, "tensor parallel size: ranks that share each matrix of a dense model")
    pp: int = arg(1, "pipeline stages")
    sp: int = arg(
        1,
        "sequence parallel size: ranks that share each row; above 1 it needs --enable_sequence_parallelism --sp_mode "
        "all_to_all",
    )
    ep: int = arg(1, "expert parallel size: ranks that share the experts of a layer")
    zero_stage: int = arg(1, "ZeRO stage of moe and 3d", choices=(0, 1, 2))
    sp_mode: str = arg(
        "split_gather",
        "sequence parallel mode: all_to_all with --sp, split_gather with --tp (ring is refused: colossalai 0.5.0 "
        "computes wrong gradients with it)",
        choices=SP_MODES,
    )
    enable_sequence_parallelism: bool = arg(False, "switch sequence parallelism on")
    zero_cpu_offload: bool = arg(False, "keep the optimizer's fp32 parameters and states in host memory")
    microbatch_size: int = arg(1, "rows of a micro-batch in the pipeline of --pp, at most --batch_size")
    num_layers_per_stage: list[int] | None = arg(
        None, "decoder layers of each pipeline stage (default: as even as can be)", many=int
    )

    def __post_init__(self) -> None:
        _one_of(self, "plugin", PLUGINS)
        _one_of(self, "sp_mode", SP_MODES)
        _one_of(self, "zero_stage", (0, 1, 2))
        for name in ("tp", "pp", "sp", "ep", "microbatch_size"):
            at_least(self, 1, name)
        for name in ("tp", "pp", "sp", "ep"):
            if self.plugin not in ("moe", "3d") and getattr(self, name) > 1:
                raise ValueError(
                    f"--{name} {getattr(self, name)} needs --plugin moe or 3d; {self.plugin} is data parallel only"
                )
        if self.zero_stage == 2 and self.pp > 1:
            raise ValueError(
                f"--zero_stage 2 with --pp {self.pp} would reduce at every micro-batch; use --zero_stage 1"
            )
        self._check_pipeline()
        if self.tp > 1 and self.ep > 1:
            raise ValueError(f"--tp {self.tp} shares the matrices of dense models, --ep {self.ep} experts; use one")
        self._check_sequence_parallelism()

    def _check_pipeline(self) -> None:
        layers = self.num_layers_per_stage
        if layers is not None and (len(layers) != self.pp or min(layers) < 1):
            raise ValueError(f"--num_layers_per_stage takes --pp {self.pp} numbers of at least 1, got {layers}")
        if self.microbatch_size > 1 and self.pp == 1:
            raise ValueError(
                f"--microbatch_size {self.microbatch_size} needs --pp above 1: only a pipeline has micro-batches; use "
                "--batch_size and --accumulation_steps"
            )

    def _check_sequence_parallelism(self) -> None:
        if self.sp_mode == "ring":
            raise ValueError("--sp_mode ring gives wrong gradients in colossalai 0.5.0; use all_to_all or split_gather")
        ulysses = self.enable_sequence_parallelism and self.sp_mode == "all_to_all"
        if ulysses != (self.sp > 1) or (ulysses and self.tp > 1):
            raise ValueError(
                "--sp above 1, --enable_sequence_parallelism and --sp_mode all_to_all go together, without --tp"
            )
        if self.enable_sequence_parallelism and not ulysses and (self.tp == 1 or self.pp > 1):
            raise ValueError(f"--sp_mode split_gather needs --tp above 1 and --pp 1, got --tp {self.tp} --pp {self.pp}")


@dataclass(kw_only=True)
class OptimConfig:
    """What any training has."""

    lr: float = arg(3e-4, "peak learning rate; cosine decay to a tenth of it")
    warmup_steps: int | None = arg(None, "linear warm-up (default: 2.5%% of all steps, at least 1)")
    weight_decay: float = arg(0.1, "AdamW's weight decay")
    grad_clip: float = arg(1.0, "clip the gradient norm to this; 0 does not clip")
    mixed_precision: str | None = arg(None, "default: bf16 on accelerators, fp32 on CPUs", choices=PRECISIONS)
    use_grad_checkpoint: bool = arg(False, "recompute activations in the backward pass", short="-g")
    use_flash_attn: bool = arg(False, "use the flash-attn package instead of PyTorch's SDPA", short="-f")
    skip_nonfinite: bool = arg(False, "leave out and count steps whose loss or gradient is not finite")
    max_skipped: int = arg(10, "stop with an error when so many steps in a row are left out by --skip_nonfinite")
    seed: int = arg(42, "seed of the adapter's start values, of dropout and of the data order")

    def __post_init__(self) -> None:
        _one_of(self, "mixed_precision", (*PRECISIONS, None))
        at_least(self, 1, "max_skipped")
        for name in ("weight_decay", "grad_clip", "seed"):
            at_least(self, 0, name)
        if self.warmup_steps is not None:
            at_least(self, 0, "warmup_steps")
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise ValueError(f"--lr must be positive, got {self.lr}")


@dataclass(kw_only=True)
class TrainConfig(OptimConfig):
    """The optimisation."""

    num_epochs: int = arg(1, "passes over the data", short="-n")
    max_steps: int | None = arg(None, "stop after this many optimizer steps (default: all of --num_epochs)")
    batch_size: int = arg(2, "samples of one process in one micro-step")
    accumulation_steps: int = arg(1, "micro-steps of one optimizer step")
    torch_compile: bool = arg(
        False, "compile norms, attention and dense MLPs of the layers: faster, after a start of some 20 s; on GPUs"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_epochs", "batch_size", "accumulation_steps"):
            at_least(self, 1, name)
        if self.max_steps is not None:
            at_least(self, 1, "max_steps")


@dataclass(kw_only=True)
class OutputConfig:
    """Where results go."""

    save_dir: str = arg("checkpoint_dir", "directory of the run; the adapter goes to its folder lora, a model to model")
    tensorboard_dir: str | None = arg(None, "TensorBoard logs (default: tensorboard in --save_dir)")
    config_file: str = arg("training_config.json", "where to save the resolved config; a bare name goes to --save_dir")
    save_interval: int = arg(0, "save the state of the training every so many steps; 0: only when asked to stop")
    keep_last: int = arg(2, "how many such states to keep")
    overwrite: bool = arg(
        False, "replace the finished adapter or model of an earlier run in --save_dir, when this run is complete"
    )
    resume: str | None = arg(None, "go on from a state: its directory, or latest for the newest in --save_dir, if any")

    def __post_init__(self) -> None:
        at_least(self, 0, "save_interval")
        at_least(self, 1, "keep_last")


@dataclass(kw_only=True)
class FinetuneConfig:
    """All of `applications/lora_finetune.py`."""

    pretrained: str = arg(dataclasses.MISSING, "Hugging Face directory of the base model", short="-m")
    data: DataConfig
    lora: LoraSettings
    parallel: ParallelConfig
    train: TrainConfig
    output: OutputConfig

    @property
    def trains_adapter(self) -> bool:
        """LoRA, or else all weights."""
        return self.lora.trains_adapter

    @property
    def most_states(self) -> int | None:
        """How many states the run saves at most, if that is known before its steps are."""
        every, last = self.output.save_interval, self.train.max_steps
        return last // every if every and last is not None else None

    def __post_init__(self) -> None:
        if self.parallel.plugin.startswith("gemini"):
            self._check_gemini()
        if self.data.packing and self.parallel.sp > 1:
            raise ValueError("--packing with --sp: the ranks would mix the samples of a row; use one of them")
        if self.train.torch_compile:
            self._check_compile()
        rows, micro = self.train.batch_size, self.parallel.microbatch_size
        if micro > rows:
            more = ", and --packing makes fewer of them" if self.data.packing else ""
            raise ValueError(f"--microbatch_size {micro} is more than the rows of --batch_size {rows}{more}")

    def _check_compile(self) -> None:
        for name in ("tp", "sp"):
            if (size := getattr(self.parallel, name)) > 1:
                raise ValueError(f"--torch_compile with --{name} {size}: layers that communicate are not compiled")
        if self.parallel.plugin.startswith("gemini"):
            raise ValueError(f"--torch_compile does not go with --plugin {self.parallel.plugin}")

    def _check_gemini(self) -> None:
        plugin = f"--plugin {self.parallel.plugin}"
        if self.trains_adapter:
            raise ValueError(f"{plugin} cannot train LoRA in colossalai; use --plugin zero2, or --lora_rank 0")
        if self.output.save_interval or self.output.resume is not None:
            raise ValueError(f"{plugin} cannot save states to resume from; use --plugin zero2 or zero2_cpu")
        if self.data.packing:
            raise ValueError(f"{plugin} cannot be checked for --packing; use --plugin zero2 or zero2_cpu")


def flatten_config(config: Any) -> dict[str, Any]:
    """The flat values of a config: what `build_config` made it from, with the defaults filled in."""
    flat = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        flat.update(flatten_config(value) if dataclasses.is_dataclass(value) else {item.name: value})
    return flat


def at_least(config: Any, bound: int, name: str) -> None:
    if not getattr(config, name) >= bound:  # nan is not
        raise ValueError(f"--{name} must be at least {bound}, got {getattr(config, name)}")


def _one_of(config: Any, name: str, accepted: tuple) -> None:
    if getattr(config, name) not in accepted:
        raise ValueError(f"--{name} must be one of {accepted}, got {getattr(config, name)!r}")
