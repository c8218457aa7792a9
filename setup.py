"""Packaging that pyproject.toml cannot say: three top-level folders install as one package.

CMake is driven by scikit-build-core's setuptools plugin; nothing here knows how the native core is built.
"""

from setuptools import setup

setup(
    packages=[
        "ktinject",
        "ktinject.cli",
        "ktinject.rules",
        "ktinject.weights",
        "ktinject.operators",
        "ktinject.optimize_rules",
    ],
    package_dir={
        "ktinject": "ktinject",
        "ktinject.operators": "operators",
        "ktinject.optimize_rules": "optimize_rules",
    },
    package_data={"ktinject": ["py.typed", "*.pyi"], "ktinject.optimize_rules": ["*.yaml"]},
    cmake_source_dir=".",
)
