"""Installs pase_mtf; the folders models/ and launch/ become pase_mtf.models and pase_mtf.launch."""

from setuptools import setup

_TEST = ["pytest>=8", "pytest-xdist>=3", "hypothesis>=6", "tensorflow-probability>=0.25",
         "mock>=5", "ruff>=0.6"]

setup(
    name="pase_mtf",
    version="0.1.0",
    description="Provably best parallelization strategies for Mesh-TensorFlow models",
    license="Apache-2.0",
    python_requires=">=3.10",
    package_dir={"pase_mtf": "pase_mtf", "pase_mtf.models": "models", "pase_mtf.launch": "launch",
                 "pase_mtf.configs": "configs"},
    packages=["pase_mtf", "pase_mtf.cost", "pase_mtf.search", "pase_mtf.models", "pase_mtf.launch",
              "pase_mtf.configs"],
    package_data={"pase_mtf.configs": ["machines/*.json", "models/*.json"]},
    install_requires=[
        "mesh-tensorflow>=0.1.21,<0.2",
        "numpy>=1.26,<3",
        "numba>=0.60",
        "absl-py>=2",
        "tqdm>=4.66",
        "matplotlib>=3.8",
        "pillow>=10",
        "tokenizers>=0.19",
    ],
    extras_require={
        # TensorFlow comes in two builds of the same package; pip cannot choose by hardware, so the user does.
        "cpu": ["tensorflow-cpu>=2.21,<2.22"],
        "gpu": ["tensorflow[and-cuda]>=2.21,<2.22"],
        "test": _TEST,
        "benchmark": ["scipy>=1.11"],
    },
)
