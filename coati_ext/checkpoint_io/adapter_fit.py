"""Whether an adapter's tensors belong to a model, told from names and shapes before any weight is read."""

from collections import Counter
from pathlib import Path

from torch import nn

from coati_ext.checkpoint_io.adapter_config import read_shapes
from coati_ext.checkpoint_io.names import from_disk
from coati_ext.models.targets import structure_of
from coati_ext.utils.adapter_files import adapter_file


def check_adapter_fits(model: nn.Module, directory: str | Path) -> None:
    """Every tensor has a place in the model and its shape, and no expert of an adapted layer is left out.

    Args:
        model: whole or sharded, also on the meta device.

    Raises:
        ValueError: names the file and the tensor.
    """
    file = adapter_file(directory)
    structure = structure_of(model)
    places = {candidate.path: candidate for candidate in structure.candidates}
    found: Counter[str] = Counter()
    for key, shape in read_shapes(file).items():
        tensor = from_disk(key)
        place = places.get(tensor.target)
        if place is None or (tensor.expert is None) != (place.projection is None):
            raise ValueError(f"{file}: {structure.class_name} has no place for {key}; is it another model's adapter?")
        if (tensor.expert or 0) >= place.num_matrices:
            raise ValueError(f"{file}: {key} is of an expert that is not there: a layer has {place.num_matrices}")
        width, expected = (shape[1], place.in_features) if tensor.factor == "lora_A" else (shape[0], place.out_features)
        if width != expected:
            raise ValueError(
                f"{file}: {key} has shape {list(shape)}, but this model's projection is {expected} wide there; is it "
                "another model's adapter?"
            )
        found[tensor.target] += 1
    for target, count in found.items():
        if count != 2 * places[target].num_matrices:
            raise ValueError(f"{file} has {count} of the {2 * places[target].num_matrices} tensors of {target}")
