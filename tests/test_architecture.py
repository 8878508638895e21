"""docs/architecture.md against the tree: every module has its row, and rows import only what stands above them."""

import ast
import importlib.util
import os
import re
import sys

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest

pytestmark = pytest.mark.skipif("TEST_SRCDIR" in os.environ, reason="Bazel lays out only the files a target names")

_FOLDERS = {"pase_mtf": "pase_mtf", "configs": "pase_mtf.configs", "models": "pase_mtf.models",
            "launch": "pase_mtf.launch"}
_OUTSIDE = ("pase_mtf", "pase_mtf.configs", "pase_mtf._early_signals", "pase_mtf._estimator",
            "pase_mtf._import_hook", "pase_mtf._same_graphs", "pase_mtf._tensorflow")
"""Packages that are no layer: the public names, which are loaded on first use, numbers without code, and what stands
below `compat`."""


@pytest.fixture(scope="module")
def files(repository):
    """Module, as setup.py installs it -> its file; a package is its __init__."""
    found = {}
    for folder, package in _FOLDERS.items():
        for file in (repository / folder).rglob("*.py"):
            parts = [package, *file.relative_to(repository / folder).with_suffix("").parts]
            found[".".join(parts).removesuffix(".__init__")] = file
    return found


@pytest.fixture(scope="module")
def rows(repository):
    """The table of modules: (name, what the package may import or None, text) in order."""
    page = (repository / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("\n## Packages and modules\n")[2].partition("\n## ")[0]
    found = []
    for line in table.splitlines():
        if match := re.fullmatch(r"\| (\*\*)?`([\w.]+)`(?:\*\*)? \| (.*) \|(.*)\|", line):
            name = match[2] if match[2] == "pase_mtf" else f"pase_mtf.{match[2]}"
            allowed = {f"pase_mtf.{other}" for other in re.findall(r"`([\w.]+)`", match[4])} if match[1] else None
            found.append((name, allowed, match[3]))
    return found


def test_every_module_has_one_row_and_every_row_a_module(files, rows):
    names = [name for name, _, _ in rows]
    missing, foreign = sorted(files.keys() - set(names)), sorted(set(names) - files.keys())
    twice = sorted({name for name in names if names.count(name) > 1})
    assert not missing, "no row in docs/architecture.md for " + ", ".join(missing)
    assert not foreign, "rows in docs/architecture.md for modules that do not exist: " + ", ".join(foreign)
    assert not twice, "more than one row in docs/architecture.md for " + ", ".join(twice)
    assert [name for name, _, text in rows if not text.strip()] == []


def test_every_file_can_be_read_in_one_go(files):
    lengths = {str(file): file.read_text(encoding="utf-8").count("\n") for file in files.values()}
    assert [f"{file}: {lines} lines; split it" for file, lines in lengths.items() if lines >= 500] == []


def test_packages_stand_in_the_order_of_the_contract(repository, rows):
    settings = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))
    contract, = (contract for contract in settings["tool"]["importlinter"]["contracts"] if contract["type"] == "layers")
    layer_of = {name.strip(): number for number, layer in enumerate(reversed(contract["layers"]))
                for name in layer.split("|")}
    packages = [name for name, allowed, _ in rows if allowed is not None and name not in _OUTSIDE]
    assert set(packages) == set(layer_of)
    assert packages == sorted(packages, key=layer_of.get), "the contract has them in another order, from the ground up"


def test_what_knows_no_tensorflow_is_one_list(repository):
    """The contract's; the page says it in words, and mypy is strict with all of it."""
    tools = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    contract, = (contract for contract in tools["importlinter"]["contracts"]
                 if contract["name"] == "What a search needs knows no TensorFlow")
    light = set(contract["source_modules"])
    strict, = (override["module"] for override in tools["mypy"]["overrides"] if "disallow_untyped_defs" in override)
    assert light - {name.removesuffix(".*") for name in strict} == set()
    page = (repository / "docs" / "architecture.md").read_text(encoding="utf-8")
    named, = re.findall(r"^What a search needs \(([^)]*)\)", page, re.MULTILINE)
    assert {f"pase_mtf.{name}" for name in re.findall(r"`([\w.]+)`", named)} == light


def _imported(file, files):
    """The modules that a file imports, but for the types' sake; within functions as well."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    typing = {id(inner) for node in ast.walk(tree)
              if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
              for statement in node.body for inner in ast.walk(statement)}
    for node in ast.walk(tree):
        if id(node) in typing:
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in files)
        elif isinstance(node, ast.ImportFrom) and node.module in files:
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                yield inner if inner in files else node.module


def test_modules_import_only_what_stands_above_them(files, rows):
    """So there is no circle, of packages or within one; what a package may import is what its row says."""
    place = {name: number for number, (name, _, _) in enumerate(rows)}
    packages = {name: allowed for name, allowed, _ in rows if allowed is not None}
    imported = {name: set(_imported(file, files)) - {name} for name, file in files.items()}

    def package_of(name):
        return max((package for package in packages if f"{name}.".startswith(f"{package}.")), key=len)

    def reached(name, seen):
        for other in imported[name] - seen:
            seen.add(other)
            reached(other, seen)
        return seen

    wrong = []
    for name, others in imported.items():
        for other in sorted(others):
            home, theirs = package_of(name), package_of(other)
            if home != theirs:
                if theirs not in packages[home]:
                    wrong.append(f"{name} imports {other}, which the row of {home} does not allow")
            # A package's __init__ gathers what is in it; what is in it may ask it for what it does not gather.
            elif f"{other}.".startswith(f"{name}.") or f"{name}.".startswith(f"{other}."):
                if name in reached(name, set()):
                    wrong.append(f"{name} imports {other}, and {other} imports {name}")
            elif place[other] > place[name]:
                wrong.append(f"{name} imports {other}, which stands below it")
    assert not wrong, "\n".join(wrong)


def test_a_package_may_import_only_packages_above_it(rows):
    place = {name: number for number, (name, _, _) in enumerate(rows)}
    wrong = [f"{name}: {other}" for name, allowed, _ in rows for other in allowed or ()
             if other not in place or place[other] >= place[name]]
    assert wrong == []


def test_an_import_within_a_function_needs_its_reason(repository, tmp_path):
    spec = importlib.util.spec_from_file_location("lint", repository / "tools" / "lint.py")
    lint = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lint)
    lint._ROOT = tmp_path
    file = tmp_path / "file.py"
    file.write_text("import io\n\n\ndef f():\n    import os\n    import sys  # takes long\n    import re\n"
                    "    io.open(os)\n\n    # Likewise.\n    from a import (\n        b)\n"
                    "    import c\n", encoding="utf-8")
    assert [problem.partition(": ")[0] for problem in lint._unexplained(file)] == ["file.py:5"]


def test_the_checker_of_certificates_shares_no_code_with_the_searches(files):
    checker = {"pase_mtf.search.certificate", *(name for name in files if name.startswith("pase_mtf.search.checked_"))}
    claims = {f"pase_mtf.{name}" for name in ("errors", "search.compiled", "search.network", "search.proof",
                                              "search.registry")}  # the last: Solution, the claim itself
    assert len(checker) == 5
    for name in checker:
        found = {node.module for node in ast.walk(ast.parse(files[name].read_text(encoding="utf-8")))
                 if isinstance(node, ast.ImportFrom) and str(node.module).startswith("pase_mtf")}
        assert found <= checker | claims, name


@pytest.mark.parametrize("codes", [(0, -9), (-9, 0), (0, 1)])
def test_a_checker_that_was_killed_has_not_passed(repository, monkeypatch, codes):
    """Where memory runs out, say: its code is negative."""
    spec = importlib.util.spec_from_file_location("lint", repository / "tools" / "lint.py")
    lint = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lint)
    left = iter(codes)
    monkeypatch.setattr(lint, "_missing", lambda: [])
    monkeypatch.setattr(lint, "_imports", lambda: 0)
    monkeypatch.setattr(lint, "_FOLDERS", {})
    monkeypatch.setattr(lint, "_command", lambda command, folder: next(left))
    assert lint.main() == 1
    assert list(left) == []
