"""Names of weights: from those of a checkpoint, whichever transformers version wrote it, to those of the model.

transformers states how they differ (conversion_mapping.py): by renames, and by merges of one 2-D tensor per expert into
the stacked parameters. Both are only names here, so that a tensor can be read straight to its place; a family whose
weights are converted otherwise (transposed, interleaved, split) is refused by name.
"""

import re
from dataclasses import dataclass

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming

_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
_STACK = (MergeModulelist, 0)  # experts in front
_ROWS = (Concatenate, 1)  # then gate above up


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a tensor of a checkpoint is in the model: all of a weight, or one of the equal parts of an expert's rows."""

    name: str
    expert: int | None = None
    part: int = 0
    num_parts: int = 1


class WeightNames:
    """The names of one model, which may lack modules that other ranks have."""

    def __init__(self, model: PreTrainedModel) -> None:
        conversions = get_model_conversion_mapping(model)
        self._model_type = model.config.model_type
        self._renames = [each for each in conversions if isinstance(each, WeightRenaming)]
        self._converters = [each for each in conversions if isinstance(each, WeightConverter)]
        self._here = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._here |= {name for name, _ in model.named_buffers(remove_duplicate=False)}

    def place(self, name: str) -> Place:
        """Where a tensor of a checkpoint belongs; the name is its own where transformers states nothing else.

        Raises:
            ValueError: transformers converts it by anything but a merge of experts.
        """
        renamed = name
        for rename in self._renames:
            renamed, _ = rename.rename_source_key(renamed)
        for converter in self._converters:
            target, pattern = converter.rename_source_key(renamed)
            if pattern is not None:
                return self._merged(name, target, pattern, converter)
        return Place(name=name if name in self._here and renamed not in self._here else renamed)

    def _merged(self, name: str, target: str, pattern: str, converter: WeightConverter) -> Place:
        expert = _EXPERT.search(name)
        patterns = converter.source_patterns
        operations = [(type(operation), getattr(operation, "dim", None)) for operation in converter.operations]
        if expert is None or operations != ([_STACK, _ROWS] if len(patterns) > 1 else [_STACK]):
            raise ValueError(
                f"{name}: transformers makes {target} of {self._model_type!r} from it by "
                f"{', '.join(operation.__name__ for operation, _ in operations)}, which is not supported; accepted are "
                "renames and merges of one tensor per expert"
            )
        return Place(name=target, expert=int(expert[0]), part=patterns.index(pattern), num_parts=len(patterns))


def of_expert(name: str, expert: int) -> str:
    """The name of the same tensor of another expert.

    Example:
        >>> of_expert("model.layers.0.mlp.experts.3.up_proj.weight", 5)
        'model.layers.0.mlp.experts.5.up_proj.weight'
    """
    return _EXPERT.sub(str(expert), name)
