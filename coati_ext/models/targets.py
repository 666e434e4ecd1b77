"""Which projections of a decoder LoRA may go to, and how `--lora_targets` names them.

Every candidate has a path and a kind. Routed experts have no module per projection in transformers 5, so they are
listed under the paths that they have on disk: `model.layers.3.mlp.experts.gate_proj` stands for that projection of all
experts of the layer.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from coati_ext.moe.experts import PROJECTIONS, is_experts_module

KINDS = ("routed experts", "shared experts", "dense MLP", "attention")

NAMED_SETS: dict[str, tuple[str, ...]] = {
    "mlp": ("routed experts", "shared experts", "dense MLP"),
    "experts": ("routed experts",),
    "shared_experts": ("shared experts",),
    "dense_mlp": ("dense MLP",),
    "attention": ("attention",),
    "all": KINDS,
    "all-linear": KINDS,  # PEFT's word; unlike PEFT on transformers 5 it leaves the router alone
}

_MIXTRAL_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_ROUTER_NAMES = {"gate", "router", "shared_expert_gate"}
_UNTRAINED = {*_ROUTER_NAMES, "indexer"}  # sparse attention's indexer ends in top-k indices: it has no gradient


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One projection that can be adapted. `projection` is set for routed experts, whose module holds several."""

    path: str
    kind: str
    module_path: str
    in_features: int
    out_features: int
    projection: str | None = None
    num_matrices: int = 1


@dataclass(frozen=True, kw_only=True)
class Structure:
    """What the whole model is made of: the same on every rank, whatever part of the model it holds."""

    class_name: str
    candidates: tuple[Candidate, ...]
    routers: tuple[str, ...]
    num_experts: int
    num_parameters: int
    modules: frozenset[str]
    parameters: frozenset[str]
    """Names as transformers builds the model."""


def structure_of(model: nn.Module) -> Structure:
    """Taken at the first call, which must come before the model is sharded or given LoRA, and kept with the model."""
    known = getattr(model, "structure", None)
    if known is None:
        pool = candidates(model)
        known = model.structure = Structure(
            class_name=type(model).__name__,
            candidates=tuple(pool),
            routers=tuple(routers(model)),
            num_experts=max((c.num_matrices for c in pool if c.projection is not None), default=0),
            num_parameters=sum(p.numel() for p in model.parameters()),
            modules=frozenset(name for name, _ in model.named_modules() if name),
            parameters=frozenset(name for name, _ in model.named_parameters(remove_duplicate=False)),
        )
    return known


def candidates(model: nn.Module) -> list[Candidate]:
    """Every adaptable projection, in model order. Embeddings, head, norms and routers are not among them."""
    found = []
    for path, module in model.named_modules():
        if is_experts_module(module):
            found += _of_experts(path, module)
        elif isinstance(module, nn.Linear) and (kind := _kind_of_linear(path)) is not None:
            widths = {"in_features": module.in_features, "out_features": module.out_features}
            found.append(Candidate(path=path, kind=kind, module_path=path, **widths))
    return found


def _of_experts(path: str, experts: nn.Module) -> list[Candidate]:
    num_experts, hidden, intermediate = experts.down_proj.shape
    found = []
    for name in PROJECTIONS if hasattr(experts, "gate_up_proj") else ("up_proj", "down_proj"):
        ends = (intermediate, hidden) if name == "down_proj" else (hidden, intermediate)
        found.append(
            Candidate(
                path=f"{path}.{name}",
                kind="routed experts",
                module_path=path,
                in_features=ends[0],
                out_features=ends[1],
                projection=name,
                num_matrices=num_experts,
            )
        )
    return found


def _kind_of_linear(path: str) -> str | None:
    *parents, leaf = path.split(".")
    if not any(part.isdigit() for part in parents) or _UNTRAINED.intersection((*parents, leaf)):
        return None  # outside the decoder layers, in a router, or out of every gradient's way
    if any(part.startswith("shared_expert") or part == "shared_mlp" for part in parents):
        return "shared experts"
    if any("attn" in part or "attention" in part for part in parents):
        return "attention"
    return "dense MLP"


def routers(model: nn.Module) -> list[str]:
    """Paths of the routers: the `gate` beside each experts module."""
    blocks = [path.rpartition(".")[0] for path, module in model.named_modules() if is_experts_module(module)]
    paths = {path for path, _ in model.named_modules()}
    return [f"{block}.{name}" for block in blocks for name in sorted(_ROUTER_NAMES) if f"{block}.{name}" in paths]


def resolve_targets(
    model: nn.Module, targets: str | Iterable[str] | None, exclude: str | Iterable[str] | None = None
) -> list[Candidate]:
    """The candidates that the targets name, in model order.

    Args:
        targets: a named set, a projection's name ("q_proj", "shared_experts.gate_proj": what a path ends with), a
            regular expression that matches a whole path, or several of these. None is the set "mlp".
        exclude: the same, taken away.

    Raises:
        ValueError: an entry matches nothing, names the router, or asks for half of the routed experts' gate_up pair.
    """
    structure = structure_of(model)
    if targets is None:
        targets = ["mlp"]
    chosen: set[str] = set()
    for entry in [targets] if isinstance(targets, str) else sorted(targets):
        chosen |= _match(entry, structure)
    for entry in [exclude] if isinstance(exclude, str) else sorted(exclude or ()):
        chosen -= _match(entry, structure)
    resolved = [candidate for candidate in structure.candidates if candidate.path in chosen]
    if not resolved:
        raise ValueError("lora_targets: nothing is left to adapt after exclude_modules")
    _refuse_half_pairs(resolved)
    return resolved


def _match(entry: str, structure: Structure) -> set[str]:
    pool = structure.candidates
    if entry in NAMED_SETS:
        hits = {candidate.path for candidate in pool if candidate.kind in NAMED_SETS[entry]}
    else:
        name = ".".join(_MIXTRAL_NAMES.get(part, part) for part in entry.split("."))
        hits = {c.path for c in pool if c.path == name or c.path.endswith(f".{name}")} or _match_pattern(entry, pool)
    if hits:
        return hits
    if any(path == entry or path.endswith(f".{entry}") for path in structure.routers):
        raise ValueError(f"lora_targets: {entry!r} names the router, which stays frozen")
    names = sorted({candidate.path.rpartition(".")[2] for candidate in pool})
    raise ValueError(
        f"lora_targets: {entry!r} matches nothing in {structure.class_name}. Accepted: a set of {sorted(NAMED_SETS)}, "
        f"a projection of {names}, a path's end such as 'shared_experts.gate_proj', or a regular expression that "
        f"matches a whole path such as {pool[0].path!r}."
        if pool
        else f"lora_targets: {structure.class_name} has no decoder layer with a linear projection"
    )


def _match_pattern(entry: str, pool: tuple[Candidate, ...]) -> set[str]:
    try:
        pattern = re.compile(entry)
    except re.error as error:
        raise ValueError(f"lora_targets: {entry!r} is neither a name nor a regular expression ({error})") from None
    return {candidate.path for candidate in pool if pattern.fullmatch(candidate.path)}


def _refuse_half_pairs(resolved: list[Candidate]) -> None:
    by_module: dict[str, set[str]] = {}
    for candidate in resolved:
        if candidate.projection is not None:
            by_module.setdefault(candidate.module_path, set()).add(candidate.projection)
    for path, names in by_module.items():
        if ("gate_proj" in names) != ("up_proj" in names):
            only, other = ("gate_proj", "up_proj") if "gate_proj" in names else ("up_proj", "gate_proj")
            raise ValueError(
                f"lora_targets: {path} would get {only} without {other}. PEFT cannot load routed experts so: target "
                f"both, or keep to the other layers with e.g. 'shared_experts.{only}'."
            )
