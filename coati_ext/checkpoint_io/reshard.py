"""Which rank holds which slice of which tensor: the one table for splitting, joining and streaming a checkpoint.

Pure functions of the model's config, the checkpoint's names and shapes, and the layout; no weight is read.

Pipeline: the modules before `layers` in the model's own `base_model_pp_plan` are on the first stage, those after it and
the heads on the last, layers as ColossalAI distributes them. Layers past `num_hidden_layers` and `mtp.` (multi-token
prediction) are on the last; a tied embedding is on the first and the last.
Experts: contiguous chunks of them over the EP ranks, one tensor per expert or stacked.
Matrices: as the model's own `base_model_tp_plan` says, embeddings and heads by vocabulary; others are whole.
FP8: `X_scale_inv` is cut as X is. A cut of X within one of its blocks is refused, for two ranks would need that scale.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from coati_ext.checkpoint_io.fp8_format import SCALE_SUFFIX, quantization_of
from coati_ext.checkpoint_io.layout import Coordinates, Layout
from coati_ext.checkpoint_io.names import EXPERT_NAMES
from coati_ext.checkpoint_io.safetensors_file import TensorEntry
from coati_ext.checkpoint_io.stream import TensorSpec

_PREFIX = re.compile(r"^((model|language_model)\.)+")
_PP_PLAN = ("embed_tokens", "layers", "norm")  # where a config class states none
_HEADS = ("lm_head", "score")
_BY_VOCABULARY = re.compile(r"(layers\.\d+\.)?(embed_tokens|embed_in|lm_head|shared_head\.head)\.(weight|bias)")
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_STACKED = re.compile(r"(?P<leaf>(gate_up|gate|up|down)_proj)([._](?P<kind>weight|bias|blocks|scales))?")
# Projections of one expert -> (dimension that TP cuts, fused matrices along it)
_EXPERT_CUTS = {leaf: (-2, 1) for names in EXPERT_NAMES.values() for leaf in (names.gate_proj, names.up_proj)}
_EXPERT_CUTS |= {names.down_proj: (-1, 1) for names in EXPERT_NAMES.values()}
# The same for transformers' styles (distributed/tensor_parallel.py)
_COLWISE = dict.fromkeys(("colwise", "colwise_rep", "colwise_gather_output"), (-2, 1)) | {"packed_colwise": (-2, 2)}
_ROWWISE = dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input"), (-1, 1)) | {"packed_rowwise": (-1, 2)}
_WHOLE = {None, "replicated_with_grad_allreduce", "mla_kv_a_proj", "all_reduce", "sequence_parallel", "moe_tp_experts"}
# Projections that are cut between heads -> the number that tp must divide
_HEADS_OF = dict.fromkeys(("q_proj", "q_b_proj", "kv_b_proj", "o_proj"), "num_attention_heads")
_HEADS_OF |= dict.fromkeys(("k_proj", "v_proj"), "num_key_value_heads")

Spans = tuple[tuple[int, int], ...]  # (start, stop) along one dimension, ascending
Shaped = TensorEntry | TensorSpec  # or anything else with a shape


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A dimension cut into `parts`; each of the `packed` matrices fused along it by itself. The last may be shorter."""

    dim: int
    parts: int
    packed: int = 1

    def spans(self, size: int, part: int) -> Spans:
        """What `part` has of a dimension of `size`.

        Example:
            >>> Cut(dim=0, parts=2, packed=2).spans(8, 1)
            ((2, 4), (6, 8))
        """
        group = size // self.packed
        start, stop = part * self.step(size), min((part + 1) * self.step(size), group)
        return tuple((i * group + start, i * group + stop) for i in range(self.packed))

    def part(self, size: int, index: int) -> int:
        """The inverse of `spans`: the part that has `index`."""
        return index % (size // self.packed) // self.step(size)

    def step(self, size: int) -> int:
        """How much of each fused matrix a part has."""
        return math.ceil(size // self.packed / self.parts)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Who holds a tensor: the ranks of `stages`, but only EP rank `owner` if it is of one expert, each its cut."""

    stages: tuple[int, ...]
    owner: int | None = None
    ep: Cut | None = None
    tp: Cut | None = None


class Part(NamedTuple):
    """What is held alike: by every rank of these stages with this EP and TP coordinate (None: with any)."""

    stages: tuple[int, ...]
    ep: int | None
    tp: int | None


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A slice of a tensor: the product of its spans, joined in their order."""

    name: str
    spans: tuple[Spans, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(sum(stop - start for start, stop in spans) for spans in self.spans)


class Plan:
    """Who holds what; made by `plan`."""

    def __init__(self, rules: "_Rules", tensors: Mapping[str, Shaped]) -> None:
        self.layout = layout = rules.layout
        self.tensors = tensors
        self._placements = {name: rules.placement(name, tensors) for name in tensors}
        self._names: dict[Part, list[str]] = {}
        for name, placement in self._placements.items():
            eps = range(layout.ep) if placement.ep else (placement.owner,)
            tps = range(layout.tp) if placement.tp else (None,)
            for ep, tp in itertools.product(eps, tps):
                self._names.setdefault(Part(placement.stages, ep, tp), []).append(name)
        self._stages = sorted({part.stages for part in self._names})

    @property
    def parts(self) -> list[Part]:
        """All of them, in the order of the checkpoint. Each element of each tensor is in exactly one."""
        return list(self._names)

    def parts_of(self, rank: int) -> list[Part]:
        """The parts that make up what a rank holds."""
        place = self.layout.coordinates(rank)
        stages = [stages for stages in self._stages if place.pp in stages]
        wanted = itertools.starmap(Part, itertools.product(stages, (None, place.ep), (None, place.tp)))
        return [part for part in wanted if part in self._names]

    def pieces_of(self, part: Part) -> Iterator[Piece]:
        """The slices of a part."""
        for name in self._names[part]:
            shape, placement = self.tensors[name].shape, self._placements[name]
            spans = [((0, size),) for size in shape]
            for cut, index in ((placement.ep, part.ep), (placement.tp, part.tp)):
                if cut is not None:
                    spans[cut.dim] = cut.spans(shape[cut.dim], index)
            yield Piece(name=name, spans=tuple(spans))

    def pieces(self, rank: int) -> Iterator[Piece]:
        """What a rank holds."""
        return itertools.chain.from_iterable(map(self.pieces_of, self.parts_of(rank)))

    def owners(self, name: str, index: tuple[int, ...]) -> list[int]:
        """The inverse of `pieces`: the ranks, ascending, that hold one element of a tensor."""
        place, shape, layout = self._placements[name], self.tensors[name].shape, self.layout
        eps = range(layout.ep) if place.owner is None else (place.owner,)
        eps = (place.ep.part(shape[place.ep.dim], index[place.ep.dim]),) if place.ep else eps
        tps = (place.tp.part(shape[place.tp.dim], index[place.tp.dim]),) if place.tp else range(layout.tp)
        places = itertools.product(range(layout.moe_dp), place.stages, eps, tps)
        return sorted(layout.rank(Coordinates(*place)) for place in places)


def plan(config: dict[str, Any] | PreTrainedConfig, tensors: Mapping[str, Shaped], layout: Layout) -> Plan:
    """Who holds what of a checkpoint: `Plan.pieces(rank)`, and its inverse `Plan.owners(name, index)`.

    Args:
        config: the model's, or the parsed config.json.
        tensors: the whole checkpoint's, under its names.

    Raises:
        ValueError: a layout that this model cannot have, or a tensor that no rule places; names what is in conflict.
    """
    return Plan(_Rules(config, layout), tensors)


class _Rules:
    """The table itself, for one model and layout."""

    def __init__(self, config: dict[str, Any] | PreTrainedConfig, layout: Layout) -> None:
        config = _config(config)
        quantization = quantization_of(config.to_dict()) or {}
        config = config.get_text_config()
        self.layout, self._model_type = layout, config.model_type
        num_layers = getattr(config, "num_hidden_layers", None)
        if num_layers is None:
            raise ValueError(f"the config of model_type {self._model_type!r} has no num_hidden_layers")
        counts = layout.layers_per_stage(num_layers)
        self._stage_of_layer = [stage for stage, count in enumerate(counts) for _ in range(count)]
        modules = tuple(getattr(config, "base_model_pp_plan", None) or _PP_PLAN)
        middle = modules.index("layers")
        self._first, self._last = modules[:middle], modules[middle + 1 :] + _HEADS
        self._tied = getattr(config, "tie_word_embeddings", None)
        self._num_experts = next((n for name in _NUM_EXPERTS if (n := getattr(config, name, None))), 0)
        if layout.ep > 1 and (self._num_experts % layout.ep or self._num_experts == 0):
            raise ValueError(f"ep={layout.ep} does not divide the {self._num_experts} experts of {self._model_type!r}")
        self._block_size = quantization.get("weight_block_size")
        self._tp_plan = getattr(config, "base_model_tp_plan", None) or {}
        if layout.tp > 1:
            self._check_tp(config)

    def placement(self, name: str, tensors: Mapping[str, Shaped]) -> Placement:
        """Of a tensor of the checkpoint `tensors`."""
        weight = name.removesuffix(SCALE_SUFFIX)
        if weight not in tensors:
            raise ValueError(f"{name} has no weight {weight} in the checkpoint; copy the whole checkpoint again")
        base, stages = self._stages(weight, tensors)
        placement = Placement(stages=stages, **self._cuts(weight, base, tuple(tensors[weight].shape)))
        if weight != name and placement.tp is not None:
            self._check_blocks(name, placement.tp, tensors[weight].shape, tensors[name].shape)
        return placement

    def _stages(self, name: str, tensors: Mapping[str, Shaped]) -> tuple[str, tuple[int, ...]]:
        """(The name within the base model, the stages that hold the tensor)."""
        last = self.layout.pp - 1
        base = _PREFIX.sub("", name)
        if base.startswith("mtp."):
            return base.removeprefix("mtp."), (last,)
        module, _, rest = base.partition(".")
        layer = rest.partition(".")[0]
        if module == "layers" and layer.isdigit():
            past = int(layer) >= len(self._stage_of_layer)
            return base, (last if past else self._stage_of_layer[int(layer)],)
        if module in self._last:
            return base, (last,)
        if module in self._first:
            tied = "lm_head.weight" not in tensors if self._tied is None else self._tied
            return base, (0, last) if tied and last > 0 and _BY_VOCABULARY.fullmatch(base) else (0,)
        raise ValueError(
            f"tensor {name} of model_type {self._model_type!r} has no known place. Accepted: layers.N, "
            f"{', '.join(self._first + self._last)} and mtp, below model or language_model"
        )

    def _cuts(self, name: str, base: str, shape: tuple[int, ...]) -> dict[str, Any]:
        """`owner`, `ep` and `tp` of the placement."""
        if _BY_VOCABULARY.fullmatch(base):
            return {"tp": self._tp_cut(name, shape, (0, 1))}
        above, experts, inner = base.partition(".experts.")
        if not experts:
            module, _, kind = base.rpartition(".")
            return {"tp": self._tp_cut(name, shape, self._style(name, module, kind))}
        expert, _, rest = inner.partition(".")
        if expert.isdigit():
            if int(expert) >= self._num_experts:
                raise ValueError(f"{name} is of expert {expert}, but the config has {self._num_experts} experts")
            owner = int(expert) * self.layout.ep // self._num_experts
            return {"owner": owner, "tp": self._tp_cut(name, shape, self._expert_style(name, rest))}
        stacked = _STACKED.fullmatch(inner)
        if stacked is None:
            raise ValueError(f"{name} is of routed experts under an unknown name; no rule says how to share it")
        if not shape or shape[0] != self._num_experts:
            raise ValueError(f"{name} has shape {list(shape)}; expected the {self._num_experts} experts in front")
        kind = "weight" if stacked["kind"] in (None, "weight") else f"experts' {stacked['kind']}"
        style = self._style(name, f"{above}.experts.{stacked['leaf']}", kind)
        return {"ep": Cut(dim=0, parts=self.layout.ep), "tp": self._tp_cut(name, shape, style)}

    def _style(self, name: str, module: str, kind: str) -> tuple[int, int] | None:
        """(Dimension that TP cuts, fused matrices along it) by the model's plan; None where it is whole."""
        style = self._tp_plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", module))
        if self.layout.tp == 1 or style in _WHOLE or (style in _ROWWISE and kind == "bias"):
            return None
        if style not in _COLWISE | _ROWWISE or kind not in ("weight", "bias"):
            raise ValueError(f"{name}: no rule says how tp={self.layout.tp} cuts the {kind} of a {style!r} module")
        return (_COLWISE | _ROWWISE)[style]

    def _expert_style(self, name: str, rest: str) -> tuple[int, int] | None:
        """The same for a tensor of one expert; transformers' plan is of the stacked parameters that it becomes."""
        leaf, _, kind = rest.rpartition(".")
        if self.layout.tp == 1 or not any(key.endswith(".experts.down_proj") for key in self._tp_plan):
            return None
        if kind != "weight" or leaf not in _EXPERT_CUTS:
            raise ValueError(f"{name}: no rule says how tp={self.layout.tp} cuts this tensor of an expert")
        return _EXPERT_CUTS[leaf]

    def _tp_cut(self, name: str, shape: tuple[int, ...], style: tuple[int, int] | None) -> Cut | None:
        tp = self.layout.tp
        if tp == 1 or style is None:
            return None
        dim, packed = max(style[0], -len(shape)) % len(shape), style[1]
        cut = Cut(dim=dim, parts=tp, packed=packed)
        by_vocabulary = style == (0, 1)  # the one that may be uneven
        if not by_vocabulary and shape[dim] % (tp * packed):
            raise ValueError(f"tp={tp} does not divide dimension {dim} of {name}, of shape {list(shape)}")
        if cut.step(shape[dim]) * (tp - 1) >= shape[dim]:
            raise ValueError(f"tp={tp} leaves a rank without a row of {name}, of shape {list(shape)}")
        return cut

    def _check_blocks(self, name: str, cut: Cut, weight: tuple[int, ...], scale: tuple[int, ...]) -> None:
        """A scale can be cut as its weight only where the cut lies between two blocks."""
        if not self._block_size or len(weight) != len(scale):
            raise ValueError(f"{name}: to cut it, config.json must have a quantization_config.weight_block_size")
        block, step = self._block_size[cut.dim - len(weight)], cut.step(weight[cut.dim])
        if step % block:
            raise ValueError(
                f"tp={cut.parts} cuts {name.removesuffix(SCALE_SUFFIX)}, of shape {list(weight)}, every {step} of "
                f"dimension {cut.dim}, within its FP8 blocks of {block}; use a tp that cuts between blocks, or BF16"
            )
        if scale[cut.dim] != math.ceil(weight[cut.dim] / block):
            raise ValueError(f"{name} has shape {list(scale)}; not one scale a block of {self._block_size}")

    def _check_tp(self, config: PreTrainedConfig) -> None:
        if not self._tp_plan:
            raise ValueError(f"tp={self.layout.tp}: transformers has no base_model_tp_plan for {self._model_type!r}")
        for key, style in self._tp_plan.items():
            number = _HEADS_OF.get(key.rpartition(".")[2])
            heads = getattr(config, number, None) if number and style in _COLWISE | _ROWWISE else None
            if heads and heads % self.layout.tp:
                raise ValueError(f"tp={self.layout.tp} does not divide {number}={heads} of {self._model_type!r}")


def _config(config: dict[str, Any] | PreTrainedConfig) -> PreTrainedConfig:
    if isinstance(config, PreTrainedConfig):
        return config
    model_type = config.get("model_type")
    known = model_type in CONFIG_MAPPING
    config_class = CONFIG_MAPPING[model_type] if known else PreTrainedConfig  # its `get` finds only what is loaded
    try:
        return config_class.from_dict(config)
    except (StrictDataclassError, TypeError) as error:
        raise ValueError(f"config of model_type {model_type!r}: {error}") from None
