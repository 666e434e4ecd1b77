from pathlib import Path

import pytest
import yaml

from coati_ext.cli import parse_config
from coati_ext.config import FinetuneConfig
from coati_ext.dataset.conversation_template import ConversationTemplate
from coati_ext.grpo_config import GRPOConfig

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
TEMPLATES = sorted((ROOT / "recipes" / "conversation_templates").glob("*.json"))


@pytest.mark.parametrize("recipe", [r for r in RECIPES if "grpo" not in r.stem], ids=lambda path: path.stem)
def test_every_fine_tuning_recipe_parses(recipe):
    config = parse_config(FinetuneConfig, "test", ["--config", str(recipe)])
    assert config.lora.lora_rank > 0


@pytest.mark.parametrize("recipe", [r for r in RECIPES if "grpo" in r.stem], ids=lambda path: path.stem)
def test_every_grpo_recipe_parses(recipe):
    config = parse_config(GRPOConfig, "test", ["--config", str(recipe)])
    assert config.trains_adapter == ("lora_rank" in recipe.read_text())
    template = config.data.conversation_template_config
    assert template is None or (ROOT / template) in TEMPLATES


@pytest.mark.parametrize("file", TEMPLATES, ids=lambda path: path.stem)
def test_every_conversation_template_has_the_form(file):
    assert ConversationTemplate(**yaml.safe_load(file.read_text())).stop_ids
