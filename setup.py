from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="h2o_flexgen",
    version="0.1.0",
    description="Generates text in large batches with models that do not fit in memory: "
    "FlexGen's zig-zag block schedule with H2O's fixed KV budget.",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    packages=find_packages(include=["h2o_flexgen", "h2o_flexgen.*"]),
    package_data={"h2o_flexgen": ["demo_model/*"]},
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.5",
        "numpy>=1.26",
        "transformers>=4.45",
        "safetensors>=0.4",
        "huggingface_hub>=0.23",
        "tqdm>=4.64",
        "pulp>=2.7,<4",
    ],
    extras_require={
        "test": ["pytest>=8", "pytest-xdist>=3", "hypothesis>=6", "ruff>=0.6", "import-linter>=2.5"],
        "plot": ["matplotlib>=3.7"],
        "bench": ["accelerate>=1.0", "deepspeed>=0.15", "matplotlib>=3.7"],
    },
)
