"""Installs pase_mtf; the folders models/, launch/ and configs/ become pase_mtf.models, .launch and .configs."""

from pathlib import Path

from setuptools import find_packages, setup

from distutils.command.install_headers import install_headers  # isort: skip  # that of setuptools, which is imported first

_FOLDERS = {"pase_mtf": "pase_mtf", "pase_mtf.models": "models", "pase_mtf.launch": "launch",
            "pase_mtf.configs": "configs"}


class InstallPathFiles(install_headers):
    """Installs "headers" where the packages go (site-packages): there are none but .pth files, read there by Python.

    Headers, because an editable installation gets those and scripts besides the package, and no other files.
    """

    def finalize_options(self):
        """The folder that packages are installed in, in place of that of headers."""
        self.set_undefined_options("install", ("install_lib", "install_dir"), ("force", "force"))


setup(
    name="pase_mtf",
    version="0.1.0",
    description="Provably best parallelization strategies for Mesh-TensorFlow models",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    package_dir=_FOLDERS,
    packages=[name for package, folder in _FOLDERS.items()
              for name in [package, *(f"{package}.{inner}" for inner in find_packages(folder))]],
    # One line, run when Python starts: a program may import mesh_tensorflow before pase_mtf (pase_mtf/_import_hook.py).
    headers=["pase_mtf/pase_mtf-mesh-tensorflow.pth"],
    cmdclass={"install_headers": InstallPathFiles},
    package_data={"pase_mtf.configs": ["machines/*.json", "models/*.json"]},
    install_requires=[
        "mesh-tensorflow>=0.1.21,<0.2",
        "numpy>=1.26,<3",
        "numba>=0.60,<1",
        "absl-py>=2,<3",
        "tqdm>=4.66,<5",
        "tabulate>=0.10,<1",
        "platformdirs>=4,<5",
        # What files hold is checked with it; in Rust, as graphs have tens of thousands of operations.
        "pydantic>=2.7,<3",
        "typing-extensions>=4.9,<5",
        # Before 3.21 an error of a file system without locks counted as a lock that somebody holds, and was waited for.
        "filelock>=3.21,<5",
        "more-itertools>=10.5,<12",
        # In what order TensorFlow's einsum multiplies several tensors; it comes with TensorFlow.
        "opt-einsum>=3.3,<4",
        "typeguard>=4.3,<5",
    ],
    extras_require={
        # TensorFlow comes in two builds of the same package; pip cannot choose by hardware, so the user does.
        "cpu": ["tensorflow-cpu>=2.21,<2.22"],
        "gpu": ["tensorflow[and-cuda]>=2.21,<2.22"],
        # What the launcher reads and draws with: plots of its report, images, text.
        "launch": ["matplotlib>=3.8,<4", "pillow>=10,<14", "tokenizers>=0.19,<1", "jinja2>=3.1,<4"],
        # What benchmarks/ computes with besides, and some of their tests: HiGHS, rank correlations.
        "benchmark": ["scipy>=1.11,<2"],
        "lint": ["ruff>=0.6,<1", "import-linter>=2.1,<3", "mypy>=1.11,<2", "types-tabulate>=0.10,<1"],
        # mock, tensorflow-probability and setuptools serve Mesh-TensorFlow's own tests, gin-config its transformers;
        # setuptools stands in for distutils, gone since Python 3.12, and builds the wheel that is tested. tf-keras,
        # which tensorflow-probability imports, is left to the Makefile: its dependency would install one build of
        # TensorFlow over the other.
        "test": ["pytest>=8,<10", "pytest-xdist>=3.5,<4", "hypothesis>=6.100,<7",
                 "mock>=5,<6", "tensorflow-probability>=0.25,<0.26", "setuptools>=68,<90",
                 "gin-config>=0.5,<0.6"],
        # For Mesh-TensorFlow's own layout optimiser, a peer in benchmarks/layout.py. Not part of "test": it wants
        # an older protobuf than TensorFlow does. Before 9.12 the module that is loaded ahead of TensorFlow (see
        # pase_mtf/_tensorflow.py) is not the library, which then crashes.
        "auto_mtf": ["ortools>=9.12,<10"],
        # Compared with in benchmarks.search; there are wheels for Linux only, so it is not part of "test".
        "toulbar2": ["pytoulbar2>=1.4,<2"],
    },
)
