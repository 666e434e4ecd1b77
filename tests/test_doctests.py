"""The examples in the docstrings are true."""

import doctest
import importlib
import pkgutil

import pytest

import coati_ext


def modules_with_examples() -> list[str]:
    names = [module.name for module in pkgutil.walk_packages(coati_ext.__path__, "coati_ext.")]
    return [name for name in names if ">>>" in importlib.util.find_spec(name).loader.get_source(name)]


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0 and result.failed == 0
