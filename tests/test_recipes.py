from pathlib import Path

import pytest

from coati_ext.cli import parse_config
from coati_ext.config import FinetuneConfig

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_parses(recipe):
    config = parse_config(FinetuneConfig, "test", ["--config", str(recipe)])
    assert config.lora.lora_rank > 0
