"""The Python environment that `make environment` makes, as a Bazel toolchain."""

_BUILD = """
load("@bazel_tools//tools/python:toolchain.bzl", "py_runtime_pair")

py_runtime(name = "python", interpreter_path = "{python}", python_version = "PY3")

py_runtime_pair(name = "pair", py3_runtime = ":python")

toolchain(
    name = "toolchain",
    toolchain = ":pair",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
    visibility = ["//visibility:public"],
)
"""

def _environment(context):
    root = context.path(Label("@//:WORKSPACE")).dirname
    python = root.get_child(".venv").get_child("bin").get_child("python")
    if "PASE_MTF_PYTHON" in context.os.environ:
        python = context.path(context.os.environ["PASE_MTF_PYTHON"])
    if not python.exists:
        fail("there is no %s: run make environment, or name another Python in PASE_MTF_PYTHON" % python)
    context.file("BUILD.bazel", _BUILD.format(python = python))

environment = repository_rule(
    implementation = _environment,
    environ = ["PASE_MTF_PYTHON"],
    local = True,
    doc = "Registers the Python of .venv (or of the variable PASE_MTF_PYTHON) as @environment//:toolchain.",
)
