"""The layers of tensor parallelism: a slice of a linear or an embedding with the communication around it, and LoRA.

A parameter that is a slice says so: `parameter.tp_cut` is (dim, start, stop, full size). The others are alike on all
ranks of the group, and so are their gradients. Layers hold the same in `tp_cuts`, by parameter name, for loading may
replace parameters.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn

from coati_ext.models.collectives import copy, gather, reduce, reduce_scatter, share, split


class Cut(NamedTuple):
    """Which part of a parameter is here: start:stop of `full` along `dim`."""

    dim: int
    start: int
    stop: int
    full: int


@dataclass(frozen=True, kw_only=True)
class Style:
    """How a linear is shared: the dimension of the weight that is cut, and whether it is used on whole activations."""

    dim: int | None
    whole: bool = False
    """Cut by rows: the output is gathered. Cut by columns: the input, whole, is cut first."""


class TensorParallelLinear(nn.Linear):
    """This rank's slice of a linear: `leave(multiply(enter(x)))`; around LoRA, the layer calls the three itself.

    Args:
        linear: taken over; its weights may be on the meta device.
        copies: sum the gradient of the input of a linear cut by rows. Where the linears of a block have one input, the
            block does this once for all of them.
        cuts_sequence: the output of a linear cut by columns is wanted in parts along dimension 1.
        tail: of a `mla_kv_a_proj`: the last outputs, which go to this rank's heads without passing another linear.
    """

    def __init__(
        self,
        linear: nn.Linear,
        style: Style,
        tp_group: dist.ProcessGroup,
        *,
        copies: bool = True,
        cuts_sequence: bool = False,
        tail: int = 0,
    ):
        self.full_out, self.full_in = linear.weight.shape
        local = list(linear.weight.shape)
        cut = None
        if style.dim is not None:
            cut = _cut(style.dim, local[style.dim], tp_group)
            local[style.dim] = cut.stop - cut.start
        super().__init__(local[1], local[0], bias=linear.bias is not None, device="meta")
        self.style, self.tp_group, self.tail = style, tp_group, tail
        self.copies, self.cuts_sequence = copies, cuts_sequence
        self.communicates = True
        self.tp_cuts: dict[str, Cut] = {} if cut is None else {"weight": cut}
        if cut is not None and cut.dim == 0 and linear.bias is not None:
            self.tp_cuts["bias"] = cut
        for name, parameter in linear.named_parameters():
            setattr(self, name, _slice(parameter, self.tp_cuts.get(name)))
        self.train(linear.training)
        if cuts_sequence and style.dim == 1:
            sum_gradients(self, tp_group, ("bias",))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.multiply(self.enter(x))) if self.communicates else self.multiply(x)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """What the weight is multiplied with, from what the model gives."""
        if self.style.dim == 1:
            return split(x, x.dim() - 1, self.tp_group) if self.style.whole else x
        return copy(x, self.tp_group) if self.style.dim == 0 and self.copies else x

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """The local product; a bias that belongs to the sum over the ranks is left to `leave`."""
        return F.linear(x, self.weight, None if self.style.dim == 1 else self.bias)

    def leave(self, y: torch.Tensor) -> torch.Tensor:
        """What the model gets, from the local product."""
        if self.style.dim is None:
            latent, tail = y.split([y.shape[-1] - self.tail, self.tail], dim=-1)
            return torch.cat([latent, copy(tail, self.tp_group)], dim=-1)
        if self.style.dim == 0:
            return gather(y, y.dim() - 1, self.full_out, self.tp_group) if self.style.whole else y
        y = reduce_scatter(y, 1, self.tp_group) if self.cuts_sequence else reduce(y, self.tp_group)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, of {self.full_in} x {self.full_out}"


class TensorParallelLoraLinear(LoraLinear):
    """PEFT's layer on a `TensorParallelLinear`: one communication for the base and the LoRA product together.

    The factor on the cut side is a slice; the other one is whole, and its gradient, to which every rank has a part, is
    summed. Needs a base that was not adapted before.
    """

    def __init__(self, base_layer: TensorParallelLinear, adapter_name: str, *args: Any, **kwargs: Any):
        super().__init__(base_layer, adapter_name, *args, **kwargs)
        base_layer.communicates = False
        cut = base_layer.tp_cuts.get("weight")
        if cut is None:
            return
        factors = (self.lora_B[adapter_name], self.lora_A[adapter_name])
        sliced, whole = factors if cut.dim == 0 else reversed(factors)
        sliced.tp_cuts = {"weight": cut}
        sum_gradients(whole, base_layer.tp_group)
        mark_cuts(self)
        if cut.dim == 1 and isinstance(self.lora_dropout[adapter_name], nn.Dropout):
            self.lora_dropout[adapter_name] = _DropoutOfSlice(self.lora_dropout[adapter_name].p, cut)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        base = self.get_base_layer()
        return base.leave(super().forward(base.enter(x), *args, **kwargs))


class _DropoutOfSlice(nn.Module):
    """Dropout of a slice of the last dimension with this slice of the mask that the whole would get."""

    def __init__(self, p: float, cut: Cut):
        super().__init__()
        self.p, self.cut = p, cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        kept = F.dropout(x.new_ones(*x.shape[:-1], self.cut.full), self.p)
        return x * kept[..., self.cut.start : self.cut.stop]


class VocabParallelEmbedding(nn.Embedding):
    """The rows of an embedding that belong to this rank's part of the vocabulary; the vectors come out whole.

    transformers' scaled embeddings (of Gemma) stay scaled, by the scale rounded to the dtype of the weight.
    """

    def __init__(self, embedding: nn.Embedding, tp_group: dist.ProcessGroup):
        cut = _cut(0, embedding.num_embeddings, tp_group)
        num_local = cut.stop - cut.start
        super().__init__(num_local, embedding.embedding_dim, device="meta")
        pad = embedding.padding_idx
        self.padding_idx = pad - cut.start if pad is not None and cut.start <= pad < cut.stop else None
        self.scale = getattr(embedding, "scalar_embed_scale", None)
        self.tp_group, self.tp_cuts = tp_group, {"weight": cut}
        self.weight = _slice(embedding.weight, cut)
        self.train(embedding.training)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        local = ids - self.tp_cuts["weight"].start
        elsewhere = (local < 0) | (local >= self.num_embeddings)
        vectors = F.embedding(local.masked_fill(elsewhere, 0), self.weight, self.padding_idx)
        vectors = reduce(vectors.masked_fill(elsewhere.unsqueeze(-1), 0), self.tp_group)
        return vectors if self.scale is None else vectors * torch.tensor(self.scale, dtype=vectors.dtype).item()


def mark_cuts(model: nn.Module) -> None:
    """Set `tp_cut` on every parameter that is a slice."""
    for module in model.modules():
        for name, cut in getattr(module, "tp_cuts", {}).items():
            module.get_parameter(name).tp_cut = cut


def full_numel(parameter: torch.Tensor) -> int:
    """Elements of the whole of which this parameter may be a slice."""
    cut = getattr(parameter, "tp_cut", None)
    return parameter.numel() if cut is None else parameter.numel() // (cut.stop - cut.start) * cut.full


def sum_gradients(module: nn.Module, group: dist.ProcessGroup, names: tuple[str, ...] | None = None) -> None:
    """Sum over the group the gradients of the module's own parameters (default: all), of which each rank has a part.

    The hooks are put on the parameters when the module first runs: loading replaces parameters, LoRA freezes them.
    """

    def add(grad: torch.Tensor) -> torch.Tensor:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    def prepare(module: nn.Module, args: tuple) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and name in (names or (name,)) and not hasattr(parameter, "tp_is_summed"):
                parameter.register_hook(add)
                parameter.tp_is_summed = True

    module.register_forward_pre_hook(prepare)


def _cut(dim: int, size: int, group: dist.ProcessGroup) -> Cut:
    start, stop = share(size, dist.get_world_size(group), dist.get_rank(group))
    return Cut(dim, start, stop, size)


def _slice(parameter: nn.Parameter, cut: Cut | None) -> nn.Parameter:
    if cut is None:
        return parameter
    part = parameter.data.narrow(cut.dim, cut.start, cut.stop - cut.start)
    parameter.data = part.clone(memory_format=torch.contiguous_format)  # a view would keep the others' parts alive
    return parameter  # the object that an optimizer may know
