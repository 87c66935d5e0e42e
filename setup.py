"""Packaging of elaswave_plugin: versions, extras and the two console scripts."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

PATCHES = "elaswave_plugin.patches"
BASH = ("tree-sitter>=0.25", "tree-sitter-bash>=0.25,<0.26")
DOCS = ("mkdocs-material==9.8.2",)
TEST = (
    # The private parts of accelerate that we replace are known for this version only.
    "accelerate>=1.15,<1.16",
    # Quantized weights under LoRA, on a CPU too.
    "bitsandbytes>=0.48",
    "hypothesis>=6",
    "mypy>=1.11",
    "peft>=0.18",
    "py-spy>=0.4",
    "pytest>=8",
    "pytest-timeout>=2.3",
    # Tests that start no jobs run on two cores at the same time.
    "pytest-xdist>=3.6",
    "ruff>=0.6",
    # Megatron-LM's training imports it; see tests/adapters/megatron_lm.
    "six",
    "tensorboard>=2.16",
    # A few files beside torch: stateful loaders of Accelerate.
    "torchdata>=0.11",
    "transformers>=5.20,<6",
    "trl>=1.16,<2",
)

setup(
    name="elaswave_plugin",
    version="0.1.0",
    description="Keeps Megatron-Core and DeepSpeed jobs training through the loss of workers",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    # The folder patches/ goes into the package; from a checkout, it is found where it stands.
    packages=[*find_packages(include=["elaswave_plugin", "elaswave_plugin.*"]), PATCHES],
    package_dir={PATCHES: "patches"},
    package_data={"elaswave_plugin": ["py.typed"], PATCHES: ["series", "**/*.diff"]},
    install_requires=[
        # The private c10d tables that we edit are known for these versions only.
        "torch>=2.11,<2.16",
        "numpy",
        "matplotlib",
        "msgpack>=1",
        "packaging",
        "psutil",
        "pydantic>=2",
        "pyyaml",
        "rich",
        "typer",
        "xxhash",
    ],
    extras_require={
        # From 0.17 on for Python 3.12; the scripts of Megatron-LM with 0.16 and 0.17.
        "megatron": ["megatron-core>=0.16.1,<0.20"],
        "deepspeed": ["deepspeed>=0.19.8,<0.20"],
        "wandb": ["wandb"],
        # `elaswave doctor` reads launch scripts of bash by it.
        "bash": list(BASH),
        # Megatron-Core also uses apex when it finds it. Its kernels are built from source (the
        # name on the package index is another project), so it is not listed here:
        # pip install --no-build-isolation git+https://github.com/NVIDIA/apex
        "gpu": ["transformer-engine[pytorch]", "nvidia-ml-py"],
        "docs": list(DOCS),
        # Building the site is a test.
        "test": [*BASH, *DOCS, *TEST],
    },
    entry_points={
        "console_scripts": [
            "elaswave = elaswave_plugin.cli.main:main",
            "elaswave-python = elaswave_plugin.launch.python_exec:main",
        ],
        # Called by torch when it is imported.
        "torch.backends": ["elaswave = elaswave_plugin.autoload:watch"],
    },
)
