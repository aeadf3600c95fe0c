"""The five distributions: each installs, starts and uninstalls alone, and the lock files pin what they need."""

from __future__ import annotations

import re
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import ddpjob
import ddprun
from ddptrain.lesson import lesson_names
from tests.install.chart import ROOT
from tests.install.lock import DISTRIBUTIONS, HEADS, asked, pinned, project

# What a distribution alone cannot import. Ranks import torch, which is that of their program; the modules of ddpjob are
# of the extras plot and ui.
NOT_ALONE = {
    "ddprun": {"ddprun.rank_run", "ddprun.distributed.rendezvous", "ddprun.distributed.process_group"},
    "ddpjob": {
        "ddpjob.cli.training",
        "ddpjob.cli.page",
        *(f"ddpjob.ui.{name}" for name in ("fleet", "guard", "job", "log", "server")),
    },
}
LESSONS = {f"ddptrain/lessons/{name}.py" for name in lesson_names()}
EXAMPLE = ROOT / "manifests" / "examples" / "mnist-cpu.yaml"
# Imports modules, and prints the top-level packages of this project that are loaded then.
IMPORT = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(*sorted({name.partition(".")[0] for name in sys.modules if name.startswith("ddp")}))
"""


def package(name: str) -> str:
    """Return the package of a distribution."""
    return name.replace("-", "_")


def run(*words: str | Path, code: int = 0) -> str:
    """Run a program outside of the repository, and return its output."""
    done = subprocess.run(words, cwd="/", text=True, capture_output=True, timeout=300, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def requirements(name: str) -> list[Requirement]:
    """Return what a distribution requires, without its extras."""
    return [Requirement(line) for line in project(DISTRIBUTIONS[name])["dependencies"]]


def own(name: str) -> list[str]:
    """Return the distributions of this project that one requires."""
    return [needed.name for needed in requirements(name) if needed.name in DISTRIBUTIONS]


def required_by(needed: Requirement) -> list[Requirement]:
    """Return what an installed distribution requires on this machine."""
    found = [Requirement(line) for line in metadata.requires(needed.name) or []]
    extras = ("", *needed.extras)
    return [one for one in found if one.marker is None or any(one.marker.evaluate({"extra": name}) for name in extras)]


class Environment:
    """A fresh virtual environment. It has links to the installed packages that distributions of this project need."""

    def __init__(self, folder: Path, *names: str) -> None:
        venv.create(folder, symlinks=True)
        self.bin = folder / "bin"
        (self.packages,) = folder.glob("lib/python3*/site-packages")
        found: set[str] = set()
        waiting = [needed for name in names for needed in requirements(name)]
        while waiting:
            needed = waiting.pop()
            name = canonicalize_name(needed.name)
            if name not in {*found, *DISTRIBUTIONS}:
                found.add(name)
                waiting += required_by(needed)
                self._link(metadata.distribution(name))

    def _link(self, found: metadata.Distribution) -> None:
        for part in {path.parts[0] for path in found.files or []} - {"..", "__pycache__"}:
            if not (self.packages / part).exists():
                (self.packages / part).symlink_to(str(found.locate_file(part)))

    def pip(self, command: str, *words: str | Path) -> None:
        """Run pip for this environment, without a package index."""
        run(sys.executable, "-m", "pip", "--python", self.bin / "python", command, "--quiet", *words)

    def files(self, name: str) -> list[Path]:
        """Return the files of an installed distribution."""
        (record,) = self.packages.glob(f"{package(name)}-*.dist-info/RECORD")
        return [self.packages / line.split(",", 1)[0] for line in record.read_text().splitlines()]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build all wheels as pip does for a folder, but without the package index."""
    folder = tmp_path_factory.mktemp("wheels")
    options = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    run(sys.executable, "-m", "pip", "wheel", *options, *DISTRIBUTIONS.values())
    return {name: next(folder.glob(f"{package(name)}-*.whl")) for name in DISTRIBUTIONS}


def content(wheel: Path) -> set[str]:
    """Return the names of the files in a wheel, without its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_a_wheel_has_each_file_of_its_package_and_no_other(wheels: dict[str, Path]) -> None:
    for name, wheel in wheels.items():
        folder = DISTRIBUTIONS[name]
        files = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
        files = {str(file) for file in files if not {"__pycache__", "LICENSE", "pyproject.toml"} & {*file.parts}}
        expected = {f"{folder.name}/{file}" for file in files}
        assert content(wheel) == expected
        assert wheel.name.endswith("-py3-none-any.whl")
        with zipfile.ZipFile(wheel) as archive:
            (text,) = (archive.read(file) for file in archive.namelist() if file.endswith("/licenses/LICENSE"))
        assert text == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_distribution_alone_installs_starts_and_uninstalls(
    wheels: dict[str, Path], tmp_path: Path, name: str
) -> None:
    fresh = Environment(tmp_path / "venv", name, *own(name))
    # pip requires all that the metadata names: this project's own comes from the folder, the rest is linked.
    fresh.pip("install", "--no-index", "--find-links", wheels[name].parent, name)
    files = {file for file in content(wheels[name]) - LESSONS if re.search(r"(?<!__main__)\.py$", file)}
    modules = {file[:-3].replace("/", ".").removesuffix(".__init__") for file in files} - NOT_ALONE.get(name, set())
    loaded = run(fresh.bin / "python", "-c", IMPORT, *sorted(modules)).split()
    assert loaded == sorted(package(one) for one in (name, *own(name)))
    scripts = project(DISTRIBUTIONS[name]).get("scripts", {})
    for command in scripts:
        assert run(fresh.bin / command, "--version").split()[-1] == ddpjob.__version__
    if name == "ddpjob":  # which imports its templates when it renders
        assert "kind: Pod" in run(fresh.bin / name, "render", EXAMPLE)
    fresh.pip("uninstall", "--yes", name)
    assert not (fresh.packages / package(name)).exists()
    assert not [command for command in scripts if (fresh.bin / command).exists()]


def test_without_ddprun_the_others_are_whole_and_plot_names_what_is_missing(
    wheels: dict[str, Path], tmp_path: Path
) -> None:
    fresh = Environment(tmp_path / "venv", "ddpjob", "ddpplot")
    fresh.pip("install", "--no-index", "--no-deps", *wheels.values())
    files = {name: fresh.files(name) for name in wheels}
    assert len({file for owned in files.values() for file in owned}) == sum(map(len, files.values())), "owned twice"
    fresh.pip("uninstall", "--yes", "ddprun")
    del files["ddprun"]
    assert [file for owned in files.values() for file in owned if not file.exists()] == []
    run(fresh.bin / "ddpjob", "validate", EXAMPLE)
    curve = "import pathlib, ddpjob.cli.plot as plot; print(plot.history_in(pathlib.Path()))"
    assert run(fresh.bin / "python", "-c", curve) == "None\n"
    for verb in ("plot", "report"):
        error, _, following = run(fresh.bin / "ddpjob", verb, "mnist-cpu", code=2).splitlines()
        assert error == "error: the package ddprun is not installed"
        assert "pip install 'ddpjob[plot]'" in following


def test_the_lessons_are_data_of_the_trainer(wheels: dict[str, Path], tmp_path: Path) -> None:
    fresh = Environment(tmp_path / "venv")
    fresh.pip("install", "--no-index", "--no-deps", wheels["ddptrain"], wheels["ddprun"])
    program = "from ddptrain.lesson import SCRIPTS, lesson_names; print(SCRIPTS, *lesson_names())"
    scripts = fresh.packages / "ddptrain" / "lessons"
    assert run(fresh.bin / "python", "-c", program).split() == [str(scripts), *lesson_names()]


def test_all_distributions_have_one_version_and_need_each_other_in_it(wheels: dict[str, Path]) -> None:
    version = ddpjob.__version__
    assert ddprun.__version__ == version
    assert {name: wheel.name.split("-")[1] for name, wheel in wheels.items()} == dict.fromkeys(wheels, version)
    pins = [str(one.specifier) for name in wheels for one in requirements(name) if one.name in wheels]
    extras = project(DISTRIBUTIONS["ddpjob"])["optional-dependencies"]
    assert {*pins, *(extras[name][0].removeprefix("ddpplot") for name in ("plot", "ui"))} == {f"=={version}"}
    chart = yaml.safe_load((ROOT / "charts" / "ddpjob" / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (version, version)


@pytest.mark.parametrize("group", HEADS)
def test_a_lock_file_pins_all_of_its_group_with_hashes(group: str) -> None:
    """It is installed without the packages' own requirements, so each of these must be in it."""
    beside = {"trainer": ("torch",), "torch": ("trainer",), "test": tuple(HEADS)}.get(group, ())
    locked = pinned(group)
    there = {name for file in (group, *beside) for name in pinned(file)}
    wanted = [Requirement(line) for line in asked().get(group, [])]
    for name, lines in locked.items():
        assert re.fullmatch(rf"{name}==\S+( ; .+)?(?: \\\n    --hash=sha256:[0-9a-f]{{64}})+", lines), lines
        if list(metadata.distributions(name=name)):
            wanted += required_by(Requirement(name))
    assert [one.name for one in wanted if canonicalize_name(one.name) not in there] == []
    versions = {name: re.split(r"==| ", lines)[1] for file in (group, *beside) for name, lines in pinned(file).items()}
    assert [str(one) for one in wanted if not one.specifier.contains(versions[canonicalize_name(one.name)])] == []


def test_the_lock_files_have_what_the_distributions_need_and_nothing_else() -> None:
    """An image installs all that its files name; `make setup` takes what the distributions need from them alone."""
    groups, setup = asked(), re.findall(r"LOCKS \+?= (.*)", (ROOT / "Makefile").read_text())
    needed = {canonicalize_name(one.name) for name in DISTRIBUTIONS for one in requirements(name)} - {*DISTRIBUTIONS}
    assert needed - {name for file in re.findall(r"[a-z]+", " ".join(setup)) for name in pinned(file)} == set()
    for group, lines in groups.items():
        waiting, reached = [Requirement(line) for line in lines], set[str]()
        while waiting:
            one = waiting.pop()
            name = canonicalize_name(one.name)
            if name not in reached:
                reached.add(name)
                waiting += required_by(one) if list(metadata.distributions(name=name)) else []
        elsewhere = {name for name, lines in pinned(group).items() if " ; " in lines}  # of other platforms and Pythons
        assert pinned(group).keys() - reached - elsewhere == set(), group


def test_a_folder_with_the_name_of_a_package_is_not_imported_in_its_place(tmp_path: Path) -> None:
    """As a clone named ddpjob is, beside the user's script."""
    names = [package(name) for name in DISTRIBUTIONS]
    for name in names:
        (tmp_path / name / "operator").mkdir(parents=True)
    script = tmp_path / "script.py"
    script.write_text(f"import {', '.join(names)}\nprint([one.__file__ for one in ({', '.join(names)})])")
    done = subprocess.run([sys.executable, script], text=True, capture_output=True, timeout=120, check=True)
    assert "None" not in done.stdout
