"""Problems of YAML files: their lines and fields, and the same verdicts as the API server and the operator."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from ddpjob.client.validation import CheckedFile, FileProblem, validate
from ddpjob.local.admission import admit
from tests.api.specs import BAD, GOOD, Bad
from tests.builders import UID, World, a_job

HEAD = "apiVersion: ddpjob.dev/v1alpha1\nkind: DDPJob\nmetadata: {name: mnist}\nspec:\n"
OK = HEAD + "  image: trainer:1\n"


def problems(text: str) -> list[tuple[int | None, str | None, str]]:
    """Return line, field and hint of each problem."""
    return [(problem.line, problem.field, problem.hint or "") for problem in validate("job.yaml", text).problems]


def only(checked: CheckedFile) -> FileProblem:
    (problem,) = checked.problems
    return problem


def document(name: str, spec: dict[str, Any]) -> str:
    head = {"apiVersion": "ddpjob.dev/v1alpha1", "kind": "DDPJob", "metadata": {"name": name}}
    return yaml.safe_dump(head | {"spec": spec})


@pytest.mark.parametrize("spec", GOOD.values(), ids=GOOD.keys())
def test_what_the_api_server_accepts_has_no_error(spec: dict[str, Any]) -> None:
    found = validate("job.yaml", document("job", spec)).problems
    assert [problem for problem in found if problem.severity == "error"] == []


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.id)
def test_what_the_api_server_refuses_is_an_error_that_names_the_field(bad: Bad) -> None:
    found = validate("job.yaml", document(bad.name, bad.spec)).problems
    errors = [f"{problem.field}: {problem.message}" for problem in found if problem.severity == "error"]
    assert errors
    assert bad.field.split(".")[-1] in " ".join(errors)


def test_each_problem_of_each_document_has_its_line_and_field() -> None:
    text = (
        "# two jobs\n" + HEAD + "  image: trainer:1\n  numNods: 2\n  env:\n    - name: A\n      value: 3\n"
        "---\n" + OK + "  nprocPerNode: 99\n  checkpoint:\n    claimTemplate:\n      spec: {resources: {}}\n"
    )
    assert problems(text) == [
        (7, "spec.numNods", 'did you mean "numNodes"?'),
        (10, "spec.env[0].value", ""),
        (17, "spec.nprocPerNode", ""),
        (20, "spec.checkpoint.claimTemplate.spec.accessModes", ""),  # missing: the line of the object around it
    ]
    assert [(job.name, job.line) for job in validate("job.yaml", text).jobs] == [("mnist", 2), ("mnist", 12)]


LIST = "kind: List\napiVersion: v1\nitems:\n  - apiVersion: ddpjob.dev/v1alpha1\n    kind: DDPJob\n"
TEMPLATE = OK + "  template:\n    spec:\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # An unknown field hides no problem of the known ones.
        (OK + "  rendezvous: {prot: 1, port: 80}\n", [(6, "spec.rendezvous.prot"), (6, "spec.rendezvous.port")]),
        # No schema declares this field; rendering checks it.
        (TEMPLATE + "      volumes:\n        - emptyDir: {}\n", [(9, "spec.template.spec.volumes[0].name")]),
        # A document is checked after one that cannot be read, and each item of a List.
        ("a: 1\na: 2\n---\n" + OK + "  numNodes: 0\n", [(2, None), (9, "spec.numNodes")]),
        (
            LIST + "    metadata: {name: a}\n    spec: {image: i, numNodes: 0}\n  - 5\n",
            [(7, "spec.numNodes"), (8, None)],
        ),
        # A key may override a merged one, also in a mapping that is merged into another before its own turn comes.
        (TEMPLATE + "      x: {y: &b {<<: {a: '1'}, a: '2'}}\n      nodeSelector: {<<: *b}\n", []),
    ],
)
def test_problems_have_the_line_and_field_where_they_are_written(
    text: str, expected: list[tuple[int | None, str | None]]
) -> None:
    assert [(line, field) for line, field, _ in problems(text)] == expected


def test_value_of_an_anchor_has_the_line_where_it_is_written() -> None:
    text = OK + "  template:\n    metadata: &m\n      labels: {a: 1}\n    spec:\n      nodeSelector: {<<: {b: 2}}\n"
    assert [line for line, _, _ in problems(text)] == [8, 10]


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (OK + "  args: [a\n", 7, "not valid YAML"),
        (OK + "  image: b\n", 6, 'duplicate key "image"'),
        (OK + "  args: &x [*x]\n", 1, "cannot be read"),
        (OK + "  image: \x01\n", None, "special characters are not allowed"),
        (OK + "  null: 1\n", 6, "no such field"),
        ("", None, "no DDPJob"),
        ("apiVersion: v1\nkind: Secret\nmetadata: {name: a}\n", None, "no DDPJob"),
        (OK.replace("DDPJob", "DDPjob"), 2, "ddpjob.dev has no kind DDPjob"),
        (OK.replace("kind: DDPJob\n", ""), 1, "kind is missing"),
    ],
)
def test_text_without_a_usable_job_is_an_error(text: str, line: int | None, message: str) -> None:
    problem = only(validate("job.yaml", text))
    assert message in problem.message
    assert (problem.severity, problem.line) == ("error", line)


def test_objects_of_other_kinds_are_listed_and_not_checked() -> None:
    checked = validate("job.yaml", OK + "---\nkind: Secret\nmetadata: {name: a}\nwrong: 1\n---\nkind: Pod\n")
    assert checked.ignored == ["Secret a", "Pod"]
    assert checked.problems == []


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ("  command: [python, train.py]\n  nprocPerNode: 2\n", "spec.command"),
        ("  launcher: Injected\n  command: [python, train.py]\n", "spec.command"),
        ("  template: {spec: {restartPolicy: Always}}\n", "spec.template"),
        ("  networkPolicy: Isolated\n  template: {spec: {hostNetwork: true}}\n", "spec.networkPolicy"),
        ("  managedBy: example.com/other\n", "spec.managedBy"),
        ("  resources: {limits: {memory: 8}}\n", "spec.resources.limits.memory"),
        ("  resources: {limits: {memory: 1Mi}, requests: {memory: 0.5Mi}}\n", "spec.resources.requests.memory"),
    ],
)
def test_probable_mistake_that_is_allowed_is_a_warning(more: str, field: str) -> None:
    problem = only(validate("job.yaml", OK + more))
    assert (problem.severity, problem.field) == ("warning", field)


def test_what_a_server_has_set_is_no_problem() -> None:
    job = a_job(status={"state": "Running"}) | {"metadata": {"name": "mnist", "uid": UID, "managedFields": []}}
    problems = validate("job.yaml", yaml.safe_dump(job)).problems
    assert [problem.field for problem in problems if problem.severity == "error"] == []


@pytest.mark.parametrize(
    "spec",
    [
        {"numNodes": 3, "networkPolicy": "Isolated"},
        {"checkpoint": {"claimTemplate": {"spec": {"accessModes": ["ReadWriteMany"], "resources": {}}}}},
        {"numNodes": 12, "launcher": "Injected", "command": ["torchrun", "train.py"]},
        {"restartPolicy": {"rules": [{"onExitCodes": {"operator": "In", "values": [3]}, "action": "Fail"}]}},
    ],
)
def test_rendered_objects_are_those_that_the_first_plan_creates(spec: dict[str, Any]) -> None:
    job = a_job(**spec)
    world = World(job)
    world.token_key = b""  # the operator draws a token for each attempt, and `render` shows none
    planned = [create.body for phase in world.reconcile().creates for create in phase]
    rendered = admit(job, uid=UID).created()
    key = lambda body: (body["kind"], body["metadata"]["name"])  # noqa: E731
    assert sorted(rendered, key=key) == sorted(planned, key=key)
