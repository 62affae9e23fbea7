"""One set of pins, no address of a registry, and a Makefile that does no more than it must."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import nbformat
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from kvcache.paper.pages.notebook import committed_form

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, GROUPS = PYPROJECT["project"], PYPROJECT["dependency-groups"]
PYTHONS = ("3.11.0", "3.12.0", "3.13.0")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))


EXTRAS = PROJECT["optional-dependencies"]


def direct(*extras: str) -> list[Requirement]:
    """What the core asks for, and these extras beside it."""
    lines = PROJECT["dependencies"] + [line for extra in extras for line in EXTRAS[extra]]
    return [r for r in map(Requirement, lines) if r.name != "kvcache"]


def locked() -> list[tuple[Requirement, list[str]]]:
    """Every entry of the lock with its hashes."""
    entries = []
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        if line.startswith("    --hash="):
            entries[-1][1].append(line.strip(" \\").removeprefix("--hash="))
        elif line and not line.lstrip().startswith("#"):
            entries.append((Requirement(line.rstrip(" \\")), []))
    return entries


def tracked() -> list[Path]:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_every_direct_dependency_has_a_lowest_version_and_a_locked_one():
    lock = {entry.name: entry for entry, _ in locked()}
    for requirement in direct("paper", "notebooks", "test", "hardware"):
        assert {"==", ">="} & {pin.operator for pin in requirement.specifier}, f"{requirement}: no lowest"
        (pin,) = lock[requirement.name].specifier
        assert pin.version in requirement.specifier, f"{requirement}: the lock has {pin.version}; `make lock`"
        if requirement.marker is None:
            assert lock[requirement.name].marker is None, f"{requirement.name} differs between machines"


def test_the_lock_is_exact_hashed_and_the_same_for_every_python():
    entries = locked()
    names = [entry.name for entry, _ in entries]
    assert len(set(names)) == len(names) > len(direct("paper", "notebooks", "test"))
    for entry, hashes in entries:
        assert [pin.operator for pin in entry.specifier] == ["=="], entry
        assert hashes, f"{entry.name}: no hash"
        assert all(re.fullmatch("sha256:[0-9a-f]{64}", digest) for digest in hashes)


def test_conda_installs_the_lock_on_the_same_pythons():
    lines = [line.strip() for line in (ROOT / "environment.yml").read_text().splitlines()]
    items = [line.removeprefix("- ") for line in lines[lines.index("dependencies:") + 1 :]]
    python, *rest = items
    assert rest == ["pip", "pip:", "-r requirements.txt"]
    assert Requirement(python) == Requirement(f"python{PROJECT['requires-python']}")
    supported = Requirement(python).specifier
    assert all(Version(version) in supported for version in PYTHONS)
    assert Version("3.10.9") not in supported
    assert Version("3.14.0") not in supported


@pytest.mark.parametrize(
    ("part", "extras"), [("core", ("hardware", "tokenizer")), ("paper", ("paper", "notebooks"))]
)
def test_every_import_is_a_direct_dependency(part, extras):
    allowed = set()
    for requirement in direct(*extras):
        allowed |= {requirement.name, *requirement.extras}
    allowed |= {Requirement(line).name for line in GROUPS["engine"]}
    found = set()
    for path in (ROOT / "kvcache").rglob("*.py"):
        if (ROOT / "kvcache" / "paper" in path.parents) == (part == "paper"):
            found |= {name.partition(".")[0] for name in imported(path)}
    # An import may be named unlike its package (bs4), and that of an extra or a group need not be installed.
    packages = packages_distributions()
    named = {name: {*packages.get(name, ()), name.replace("_", "-"), f"{name}-cpu"} for name in found}
    foreign = found - set(sys.stdlib_module_names) - {"kvcache"}
    assert [name for name in foreign if not allowed & {canonicalize_name(n) for n in named[name]}] == []


def imported(path: Path) -> set[str]:
    """Modules that a module imports, wherever in the module; names too, which may be modules."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_the_core_never_imports_the_reproduction():
    package = ROOT / "kvcache"
    for path in package.rglob("*.py"):
        if package / "paper" not in path.parents:
            found = {name for name in imported(path) if re.match(r"kvcache\.paper\b", name)}
            assert not found, f"{path.relative_to(ROOT)} imports {', '.join(sorted(found))}"


def test_importing_the_core_loads_neither_the_reproduction_nor_what_is_slow():
    code = "import sys, kvcache; print(*sys.modules, sep='\\n')"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    loaded = set(run.stdout.split())
    assert "kvcache.solvers" in loaded
    slow = ("pyomo", "dask", "matplotlib", "seaborn", "IPython", "joblib", "scipy.optimize", "kvcache.paper")
    assert [name for name in loaded if name.startswith(slow)] == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel as an installer unpacks it."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, source)
    shutil.copytree(ROOT / "kvcache", source / "kvcache", ignore=shutil.ignore_patterns("__pycache__"))
    code = f"from setuptools import build_meta; print(build_meta.build_wheel({str(source)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, check=True)
    (built,) = source.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(site)
    return site


def test_the_wheel_is_the_core_and_works_in_any_folder(wheel, tmp_path):
    assert not (wheel / "kvcache" / "paper").exists()
    (tmp_path / "log.csv").write_text("ts,prompt,gen\n0.0,120,85\n0.4,900,12\n1.1,64,40\n")
    code = """
import kvcache, numpy
from kvcache.hardware import serving_configs
read = kvcache.read_trace("log.csv", arrival_s="ts", input_tokens="prompt", output_tokens="gen").requests
lengths = kvcache.LengthDistribution.from_samples(read["output_tokens"], upper=200)
groups = serving_configs(
    kvcache.GPU.preset("A100-80GB"), kvcache.Model.preset("Llama-3-70B"), [kvcache.ParallelConfig(4)]
)
chat = kvcache.RequestClass("chat", 1.0, 300.0, 0.0, 60.0, lengths)
print(kvcache.__file__, kvcache.solve(kvcache.Problem((chat,), groups, gpus=8)).status, sep="\\n")
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(wheel)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout.splitlines() == [str(wheel / "kvcache" / "__init__.py"), "optimal"], run.stderr


def test_no_file_holds_the_address_of_a_package_registry():
    # Put together here, so that this file passes its own test.
    words = [".".join(pair) for pair in [("pypi", "org"), ("pythonhosted", "org"), ("anaconda", "org")]]
    words += ["-".join(parts) for parts in [("", "", "index", "url"), ("", "", "extra", "index", "url")]]
    for path in tracked():
        content = path.read_bytes().lower()
        assert [word for word in words if word.encode() in content] == [], path


def test_no_notebook_or_source_names_a_folder_of_the_machine_it_was_made_on():
    own = [str(Path.home()), str(ROOT), sys.prefix]
    for path in tracked():
        if path.suffix in {".py", ".ipynb", ".md", ".csv", ".svg", ".toml", ".txt", ".yml"}:
            content = path.read_text(encoding="utf-8")
            # A short one, such as /root or /app, is a word of prose.
            assert [place for place in own if len(place) > 8 and place in content] == [], path


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_committed_executed_and_normalised(path):
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    assert committed_form(book) == book, "run `make embed`"
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    parameters = [cell for cell in code if "parameters" in cell.metadata.get("tags", [])]
    assert ['PROFILE = "quick"' in cell.source for cell in parameters] == [True]
    assert book.cells[0].cell_type == "markdown"
    assert any(cell.outputs for cell in code), "run `make embed`"
    assert [o.evalue for cell in code for o in cell.outputs if o.output_type == "error"] == []
    assert any("NBVAL_CHECK_OUTPUT" in cell.source for cell in code)


def test_figures_are_committed_in_both_forms():
    png, svg = ({p.stem for p in (ROOT / "figures").glob(f"*.{kind}")} for kind in ("png", "svg"))
    assert png == svg


@pytest.fixture
def project(tmp_path):
    """A project of two tiny notebooks around the real Makefile and package; nothing to install."""
    if shutil.which("make") is None:
        pytest.skip("no make")
    for name in ("Makefile", "requirements.txt", "pyproject.toml"):
        shutil.copy2(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "kvcache", tmp_path / "kvcache", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "notebooks").mkdir()
    write_notebook(tmp_path, "01_first", "import sys; print(PROFILE, sys.prefix)")
    write_notebook(tmp_path, "08_claims", "raise RuntimeError('broken off')")
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / ".environment").touch()
    return tmp_path


def write_notebook(folder: Path, name: str, source: str) -> None:
    cells = [
        nbformat.v4.new_code_cell('PROFILE = "quick"', metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell(source),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / "notebooks" / f"{name}.ipynb")


def outputs(path: Path) -> str:
    return nbformat.read(path, as_version=4).cells[-1].outputs[0].text


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KVCACHE_", "MAKE", "MFLAGS", "CONDA_"))
    }
    return subprocess.run(
        ["make", "VENV=", f"PYTHON={sys.executable}", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def ran(result: subprocess.CompletedProcess[str]) -> list[str]:
    return re.findall(r"^(\d\d_\w+): [\d.]+ s", result.stdout, re.MULTILINE)


def test_reproduce_resumes_and_runs_what_is_out_of_date_and_nothing_else(project):
    broken = make(project, "reproduce")
    assert broken.returncode != 0
    assert "RuntimeError: broken off" in broken.stderr
    assert ran(broken) == ["01_first"]
    build = project / "build" / "quick"
    assert {path.name for path in build.iterdir()} == {"01_first.ipynb", "08_claims.failed.ipynb"}
    assert outputs(build / "01_first.ipynb") == f"quick {sys.prefix}\n"

    table = "pandas.DataFrame({'id': ['C01'], 'verdict': [PROFILE]})"
    write_notebook(
        project,
        "08_claims",
        "import pandas\nfrom kvcache.paper.results import *\n"
        f"write_table({table}, 'claims.csv', PROFILE);print(1)",
    )
    resumed = make(project, "reproduce")
    assert ran(resumed) == ["08_claims"], resumed.stderr
    assert "1 claims: quick 1" in resumed.stdout
    assert {path.name for path in build.iterdir()} == {"01_first.ipynb", "08_claims.ipynb", "claims.txt"}
    assert (project / "data/results/claims.csv").read_text() == "id,verdict\nC01,quick\n"
    durations = (project / "data/results/notebooks_timings.csv").read_text().split()
    assert [line.split(",")[0] for line in durations] == ["notebook", "01_first", "08_claims", "total"]

    assert make(project, "reproduce").stdout.splitlines() == [
        "reproduce: profile quick is up to date; notebooks and claims.txt are in build/quick"
    ]

    assert make(project, "embed").returncode == 0
    embedded = project / "notebooks" / "08_claims.ipynb"
    assert outputs(embedded) == "1\n"
    book = nbformat.read(embedded, as_version=4)
    assert committed_form(book) == book
    assert make(project, "--question", "notebooks").returncode == 0

    os.utime(project / "kvcache" / "files.py")
    planned = make(project, "--dry-run", "notebooks").stdout
    assert re.findall(r"run notebooks/(\w+)", planned) == ["01_first", "08_claims"]


def test_the_full_profile_has_folders_of_its_own(project):
    assert ran(make(project, "01_first", "PROFILE=full")) == ["01_first"]
    assert outputs(project / "build/full/01_first.ipynb") == f"full {sys.prefix}\n"
    assert not (project / "build/quick").exists()
    assert "expected quick or full" in make(project, "reproduce", "PROFILE=fast").stderr


def test_help_is_the_default_and_lists_every_target(project):
    listed = dict(re.findall(r"^  ([\w-]+) +(\w.*)", make(project).stdout, re.MULTILINE))
    phony = re.search(r"^\.PHONY: (.*) \$\(NAMES\)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(phony[1].split()) == set(listed)
    assert {"setup", "reproduce", "test", "plan", "engine"} <= set(listed)
    assert "one notebook: make 01_first | 08_claims" in make(project).stdout
