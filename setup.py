"""Packaging that pyproject.toml cannot say: three top-level folders install as one package.

CMake is driven by scikit-build-core's setuptools plugin; nothing here knows how the native core is built.
"""

from setuptools import setup

setup(
    packages=[
        "ktinject",
        "ktinject.checkpoints",
        "ktinject.checkpoints.formats",
        "ktinject.cli",
        "ktinject.distributed",
        "ktinject.generation",
        "ktinject.generation.cpu",
        "ktinject.generation.cuda",
        "ktinject.hf",
        "ktinject.loading",
        "ktinject.operators",
        "ktinject.operators.linears",
        "ktinject.operators.offload",
        "ktinject.operators.probes",
        "ktinject.operators.torch_ops",
        "ktinject.optimize_rules",
        "ktinject.planning",
        "ktinject.pretrained",
        "ktinject.rules",
        "ktinject.serving",
        "ktinject.sglang",
        "ktinject.testing",
        "ktinject.tools",
        "ktinject.vllm",
    ],
    package_dir={
        "ktinject": "ktinject",
        "ktinject.operators": "operators",
        "ktinject.optimize_rules": "optimize_rules",
    },
    package_data={
        "ktinject": ["py.typed", "*.pyi"],
        "ktinject.serving": ["page/*"],
        "ktinject.optimize_rules": ["*.yaml", "*.json"],
    },
    cmake_source_dir=".",
)
