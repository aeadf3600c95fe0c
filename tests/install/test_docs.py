"""Links in the documents work, examples are valid, and everything that they name exists."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import pytest
import yaml

import ddprun.errors
import ddptrain.cli
import ddptrain.errors
from ddpjob.api.spec import DDPJobSpec, parse_spec
from ddpjob.api.status import CONDITIONS, DDPJobStatus
from ddpjob.engine.actions import EngineSettings
from ddpjob.engine.desired import Job, trainer_environment
from ddpjob_operator.controller.settings import parse
from tests.install.chart import CHART, ROOT, Object

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub generates from the headings."""
    headings = re.findall(r"^#+ +(.*)$", FENCE.sub("", text(path)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def blocks(path: Path, *languages: str) -> Iterator[str]:
    for indent, language, content in FENCE.findall(text(path)):
        if language in languages:
            yield "".join(line.removeprefix(indent) for line in content.splitlines(keepends=True))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_local_link_has_a_target(page: Path) -> None:
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", text(page)))
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor:
            assert anchor in anchors(path), f"{page.name} links to {target}, but there is no such heading"


@pytest.mark.parametrize("folder", ["operator", "trainer_app", "charts", "manifests", "images"])
def test_every_page_that_the_product_names_exists(folder: str) -> None:
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml", ".tpl", ".txt", ".j2")]
    named = {(file.name, page) for file in files for page in re.findall(r"(?<![\w/])docs/[\w/.-]+\.md", text(file))}
    assert [(file, page) for file, page in named if not (ROOT / page).exists()] == []


def job_pieces() -> Iterator[tuple[str, Object]]:
    """Return every YAML block of the documents that is a DDPJob or a part of its spec."""
    for page in PAGES:
        for number, block in enumerate(blocks(page, "yaml")):
            for document in yaml.safe_load_all(block):
                if document.get("kind") == "DDPJob":
                    yield f"{page.name}-{number}", document["spec"]
                elif "kind" not in document and "apiVersion" not in document:
                    yield f"{page.name}-{number}", {"image": "example", **document}


PIECES = dict(job_pieces())


@pytest.mark.parametrize("name", PIECES)
def test_every_job_in_the_documents_is_valid(name: str) -> None:
    parse_spec({"spec": PIECES[name]})


def test_every_named_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", text(ROOT / "Makefile"), re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", text(page), re.MULTILINE):
            assert target in targets, f"{page.name} names `make {target}`, which does not exist"


def test_every_named_chart_value_exists() -> None:
    values = yaml.safe_load(text(CHART / "values.yaml"))
    named = {
        name
        for page in PAGES
        for name in re.findall(r"(?:--set |`)((?:image|crds|operator|metrics)\.(?!jsonl)[a-zA-Z]+)", text(page))
    }
    assert named
    for name in named:
        group, key = name.split(".")
        assert key in values[group], f"no value is called {name}"


def test_documents_and_examples_name_the_images_of_the_charts_defaults() -> None:
    """Seen: the installation page loaded one tag of the trainer, and the chart's launcher had another."""
    release = yaml.safe_load(text(CHART / "Chart.yaml"))["appVersion"]
    files = [
        *PAGES,
        *(ROOT / "manifests").rglob("*.yaml"),
        ROOT / "Makefile",
        ROOT / "Dockerfile",
        ROOT / "images/trainer/Dockerfile",
    ]
    named = {
        (file.name, tag)
        for file in files
        if file.name != "CHANGELOG.md"
        for tag in re.findall(r"ddpjob/(?:operator|trainer):([\w.-]+)", text(file))
    }
    assert len(named) >= 20
    assert {(name, tag) for name, tag in named if tag not in (release, "cuda")} == set()


def test_operations_page_has_every_setting_with_its_default() -> None:
    page = text(ROOT / "docs" / "tasks" / "operations.md")
    settings = parse({})
    for name in re.findall(r"`DDPJOB_OPERATOR_([A-Z_]+)`", page):
        assert hasattr(settings, name.lower())
    for name in ("cluster_domain", "progress_interval_seconds", "sweep_interval_seconds", "log_level"):
        default = getattr(settings, name)
        shown = f"`{default}`" if isinstance(default, str) else f"{default:g}"
        assert re.search(rf"`DDPJOB_OPERATOR_{name.upper()}` \| {re.escape(shown)} \|", page), name


def test_page_of_reports_has_every_exit_code() -> None:
    kinds_of_the_page = text(ROOT / "docs" / "reference" / "reports.md").partition("## Kinds and exit codes")[2]
    rows = re.findall(r"^- `\w+` \((\d+)[) ]", kinds_of_the_page, re.MULTILINE)
    kinds = [*vars(ddprun.errors).values(), *vars(ddptrain.errors).values()]
    known = {kind.code for kind in kinds if isinstance(kind, type) and hasattr(kind, "code")}
    assert {int(row) for row in rows} - {137} == known  # 137 is the kernel's


def test_guide_has_every_environment_variable_of_the_trainer() -> None:
    page = text(ROOT / "docs" / "tasks" / "write-a-job.md")
    claim = {"claimName": "c"}
    spec = parse_spec({"spec": {"image": "i", "checkpoint": claim, "data": claim}})
    job = Job("job", "default", "12345", 1, spec, 1)
    for entry in trainer_environment(job, 1, EngineSettings()):
        assert f"`{entry['name']}`" in page, entry["name"]


def test_status_page_explains_every_condition() -> None:
    page = text(ROOT / "docs" / "reference" / "status.md")
    for name in CONDITIONS:
        assert re.search(rf"^\| {name} \|", page, re.MULTILINE), name


@pytest.mark.parametrize("model", [DDPJobSpec, DDPJobStatus])
def test_every_field_has_a_description(model: type[DDPJobSpec] | type[DDPJobStatus]) -> None:
    schema = model.model_json_schema(by_alias=True)
    for name, part in {"": schema, **schema.get("$defs", {})}.items():
        if part.get("type") != "object":
            continue
        assert part.get("description"), f"{name or model.__name__} has no description"
        for field, content in part.get("properties", {}).items():
            referred = any("$ref" in option for option in [content, *content.get("anyOf", ())])
            assert content.get("description") or referred, f"{name}.{field} has no description"


PACKAGES = {
    "rules and clients": ROOT / "operator" / "ddpjob",
    "operator": ROOT / "operator" / "ddpjob_operator",
    "launcher": ROOT / "trainer_app" / "ddprun",
    "trainer": ROOT / "trainer_app" / "ddptrain",
    "curves": ROOT / "trainer_app" / "ddpplot",
}


def test_every_file_on_the_architecture_page_exists() -> None:
    page = text(ROOT / "docs" / "develop" / "architecture.md")
    named = re.findall(r"`([\w./-]+\.(?:py|j2|tpl|toml|svg|yaml))`", page)
    assert len(named) >= 60
    for name in named:
        assert any((folder / name).exists() for folder in (ROOT, *PACKAGES.values())), f"there is no {name}"


def test_functions_on_the_architecture_page_exist() -> None:
    named = re.findall(r"`([\w.]+):([\w.]+)`", text(ROOT / "docs" / "develop" / "architecture.md"))
    assert len(named) >= 20
    for module, path in named:
        attrgetter(path)(import_module(module))


@pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
def test_architecture_page_lists_every_module(package: Path) -> None:
    page = text(ROOT / "docs" / "develop" / "architecture.md")
    table = page.split(f"| `{package.relative_to(ROOT)}/` |", 1)[1].split("\n\n", 1)[0]
    listed = {
        f"{'' if folder == '(top level)' else folder.strip('`')}{name}"
        for folder, names in re.findall(r"^\| ([^|]+) \| [^|]+ \| ([^|]+) \|$", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", names)
    }
    modules = {str(path.relative_to(package).with_suffix("")) for path in package.rglob("*.py")}
    assert listed == {name for name in modules if not re.search(r"__(init|main)__$", name)}


def test_shell_blocks_are_valid_shell() -> None:
    for page in PAGES:
        for block in blocks(page, "bash"):
            done = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True, timeout=60, check=False)
            assert done.returncode == 0, f"{page.name}: {done.stderr}\n{block}"


def test_every_ddptrain_command_in_the_documents_parses() -> None:
    lines = [line for page in PAGES for block in blocks(page, "bash") for line in block.splitlines()]
    commands = [shlex.split(line)[1:] for line in lines if re.match(r"(\.venv/bin/)?ddptrain ", line)]
    assert len(commands) >= 3
    parser = ddptrain.cli._parser()
    for command in commands:
        parser.parse_args(command)
