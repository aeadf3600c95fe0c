"""The alerts of the chart, its dashboard and the documents agree with the metrics of the operator."""

import itertools
import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from kubernetes.aio.client import Configuration

from ddpjob.api import names
from ddpjob_operator.cluster.connection import Connection
from ddpjob_operator.controller.main import Operator
from ddpjob_operator.controller.settings import ControllerSettings
from tests.builders import a_job
from tests.install.chart import NAMESPACE, ROOT, Object, of_kind, refusal, template
from tests.kind.packages import MissingProgramsError, require
from tests.prepared import skip_unless_ci

ON = {"metrics.enabled": True, "metrics.serviceMonitor": True, "metrics.rules.enabled": True}
OPERATOR = f'namespace="{NAMESPACE}",job="ddpjob-operator"'
LEADER, OTHER_LEADER = f"leader{{{OPERATOR}}}", f'leader{{namespace="{NAMESPACE}",job="another"}}'
WATCH, SERVED = f'watch_age_seconds{{{OPERATOR},path="/p"}}', 'namespace_served{namespace="b",job="ddpjob-operator"}'
ERRORS = f'reconcile_errors_total{{{OPERATOR},error="KeyError"}}'
STALLED, SAVED = 'stalled_jobs{namespace="a",kind="%s",pod="%s"}', 'checkpoint_age_seconds{namespace="a"}'
RESTARTS, WAIT = 'restarts_without_progress{namespace="a"}', 'longest_wait_seconds{namespace="a",waits_for="%s"}'
SPENT = 'time_spent_seconds_total{namespace="a",category="%s"}'
A, NONE = {"namespace": "a"}, None
# Alert; the values of series, a minute each; the labels of the alert that fires at the end.
CASES: list[tuple[str, dict[str, str], dict[str, str] | None]] = [
    # During an upgrade two operators show the same jobs.
    ("Stalled", {STALLED % ("training", "o"): "2x20", STALLED % ("training", "p"): "2x20"}, A | {"kind": "training"}),
    ("Stalled", {STALLED % ("job", "p"): "1x20"}, A | {"kind": "job"}),
    ("Stalled", {STALLED % ("job", "p"): "_x11 1x9"}, NONE),
    ("WaitsForPods", {WAIT % "pods": "1860x20"}, A),
    ("WaitsForPods", {WAIT % "pods": "1700x20", WAIT % "quota": "9000x20"}, NONE),
    ("RestartsWithoutProgress", {RESTARTS: "3x20"}, A),
    ("RestartsWithoutProgress", {RESTARTS: "2x20"}, NONE),
    ("GoodputLow", {SPENT % "training": "0+20x450", SPENT % "lost": "0+40x450", SPENT % "queued": "0+9x450"}, A),
    ("GoodputLow", {SPENT % "training": "0+40x450", SPENT % "lost": "0+20x450", SPENT % "queued": "0+99x450"}, NONE),
    ("GoodputLow", {SPENT % "training": "0+1x450", SPENT % "lost": "0+8x450"}, NONE),  # less than an hour
    ("CheckpointOld", {SAVED: "14500x20"}, A),
    ("CheckpointOld", {SAVED: "14300x20"}, NONE),
    ("OperatorDown", {LEADER: "0x20", OTHER_LEADER: "1x20"}, {}),
    ("OperatorDown", {LEADER: "1x20", WATCH: "240x20"}, {"path": "/p"}),
    ("OperatorDown", {LEADER: "1x20", SERVED: "0x20"}, {"namespace": "b"}),
    ("OperatorDown", {LEADER: "1x20", 'namespace_served{job="ddpjob-operator"}': "0x20"}, {}),  # all namespaces
    ("OperatorDown", {LEADER: "1x20", WATCH: "70x20", SERVED: "1x20"}, NONE),
    ("OperatorDown", {LEADER: "1x8 _x4 1x8"}, NONE),  # a restart
    ("ReconcileErrors", {ERRORS: "1x5 2x5 3x10"}, {"error": "KeyError"}),
    ("ReconcileErrors", {ERRORS: "3x20"}, NONE),
    ("QuotaNotGranted", {WAIT % "quota": "90000x20"}, A),
    ("QuotaNotGranted", {WAIT % "queue": "1900x20"}, A),
    ("QuotaNotGranted", {WAIT % "quota": "80000x20", WAIT % "queue": "1700x20", WAIT % "pods": "90000x20"}, NONE),
]
SAYS = {
    ("kind", "training"): "Jobs of namespace a that make no steps, while their nodes do nothing: 2.",
    ("path", "/p"): "The operator ddpjob-system/ddpjob-operator has received no data of the watch /p for 4m 0s. Jobs "
    "that run go on, but none starts, restarts or shows its progress.",
}
"""The descriptions of alerts with these labels."""


@cache
def rules(**values: Any) -> dict[str, Object]:
    [rule] = of_kind(template(ON | values, hooks=False), "PrometheusRule")
    return {each["alert"]: each for each in rule["spec"]["groups"][0]["rules"]}


@cache
def dashboard() -> Object:
    [found] = of_kind(template({"metrics.dashboard.enabled": True, "metrics.dashboard.labels.team": "ml"}), "ConfigMap")
    assert found["metadata"]["labels"].items() >= {"grafana_dashboard": "1", "team": "ml"}.items()
    content: Object = json.loads(found["data"]["ddpjob.json"])
    return content


def promtool(folder: Path, *command: str, **files: Object) -> str:
    """Run promtool with these files in a folder, and return what it says if it reports errors."""
    try:
        require("promtool", install=False)
    except MissingProgramsError as error:
        skip_unless_ci(error)
    for name, content in files.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    path = shutil.which("promtool")
    assert path is not None
    done = subprocess.run([path, *command], cwd=folder, text=True, capture_output=True, timeout=60, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def groups(*found: Object) -> Object:
    return {"groups": [{"name": "ddpjob", "rules": list(found)}]}


def test_each_alert_fires_on_what_it_is_for_and_on_nothing_else(tmp_path: Path) -> None:
    fire, quiet = ({f"DDPJob{name}" for name, _, labels in CASES if (labels is not None) is it} for it in (True, False))
    assert fire == quiet == rules().keys() and len(rules()) <= 8
    tests: list[Object] = []
    for name, series, labels in CASES:
        query = f'ALERTS{{alertname="DDPJob{name}",alertstate="firing"}}'
        shown = json.dumps(rules()[f"DDPJob{name}"]["labels"] | (labels or {}))
        listed = re.sub(r'"(\w+)": ', r"\1=", shown)[1:-1]
        expected = [{"labels": f"{query[:-1]},{listed}}}", "value": 1}] if labels is not None else []
        end = "450m" if "x450" in str(series) else "20m"
        given = [{"series": f"ddpjob_{each}", "values": values} for each, values in series.items()]
        check = {"expr": query, "eval_time": end, "exp_samples": expected}
        tests.append({"interval": "1m", "input_series": given, "promql_expr_test": [check]})
        for text in (SAYS[label] for label in (labels or {}).items() if label in SAYS):
            rule = rules()[f"DDPJob{name}"]
            notes = rule["annotations"] | {"description": text}
            alerts = [{"exp_labels": rule["labels"] | (labels or {}), "exp_annotations": notes}]
            tests[-1]["alert_rule_test"] = [{"alertname": rule["alert"], "eval_time": end, "exp_alerts": alerts}]
    given_rules = groups(*rules().values())
    assert promtool(tmp_path, "check", "rules", "rules.yaml", rules=given_rules) == ""
    cases = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    assert promtool(tmp_path, "test", "rules", "cases.yaml", cases=cases) == ""


def test_thresholds_are_values_and_a_wrong_one_is_refused_by_its_name() -> None:
    values = {
        "podsWaitSeconds": 61,
        "quotaWaitSeconds": 62,
        "restarts": 63,
        "goodput": 0.64,
        "checkpointAgeSeconds": 65,
    }
    text = json.dumps([*rules(**{f"metrics.rules.{name}": value for name, value in values.items()}).values()])
    for name, value in values.items():
        assert re.search(rf"(<|>=?) {value}\b", text), name
        for wrong in (-1, "1h"):
            assert name in refusal(ON | {f"metrics.rules.{name}": wrong})
    assert "serviceMonitor" in refusal({"metrics.rules.enabled": True})
    assert "runbookUrl" in refusal(ON | {"metrics.rules.runbookUrl": "runbooks.md"})


def test_each_alert_has_a_runbook_with_its_severity_three_commands_and_when_it_is_false() -> None:
    text = (ROOT / "docs" / "reference" / "runbooks.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert [*sections] == [*rules()]
    for name, section in sections.items():
        rule = rules()[name]
        assert rule["annotations"]["runbook_url"].endswith(f"/docs/reference/runbooks.md#{name.lower()}")
        assert rule["for"] and rule["annotations"]["summary"] and f"`{rule['labels']['severity']}`:" in section
        [commands] = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
        assert len(commands.splitlines()) == 3 and "\nFalse when " in section


async def exported() -> dict[str, tuple[str, frozenset[str]]]:
    """Return type and labels of all series of an operator, by name."""
    operator = Operator(ControllerSettings(metrics_per_job=True), Connection(None, Configuration(host="http://none")))
    metrics = operator.controller.metrics
    watch = operator._watch_of(names.PODS, None)
    watch.status._heard = 0.0
    operator._watches = {None: [watch]}
    operator._add_gauges()
    status: Any = {
        "state": "Running",
        "slow": {},
        "stall": {},
        "progress": {"step": 1},
        "furthest": {"restartsSince": 1},
    }
    status |= {"checkpoint": {"time": "2026-03-01T12:00:00Z"}}
    status |= {"time": {"asOf": "2026-03-01T12:00:00Z", "current": "training", "starting": 9}}
    waits = {"conditions": [{"type": "Reconciling", "status": "True"}]}
    for number, each in enumerate((status, waits)):
        job = a_job(status=each)
        job["metadata"] |= {"name": f"job-{number}", "creationTimestamp": "2026-03-01T11:00:00Z"}
        operator.controller.cache.put(names.DDPJOBS, job)
        metrics.observe_status(job, {}, each)
    metrics.observe_request("get", "pods", "200", 0.1)
    for labelled in (
        metrics.errors,
        metrics.reconcile_seconds,
        metrics.progress_polls,
        metrics.failures,
        metrics.restarts,
    ):
        labelled.labels("x")
    found: dict[str, tuple[str, frozenset[str]]] = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            found[sample.name] = family.type, frozenset(sample.labels)
        assert family.samples, f"no series of {family.name}"
    await operator.controller.poller.close()
    await operator.cluster.close()
    await operator._lease_cluster.close()
    return found


async def test_rules_dashboard_and_documents_name_what_the_operator_exports_and_the_documents_all() -> None:
    found = await exported()
    page = (ROOT / "docs" / "tasks" / "operations.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(ddpjob_\w+)` \| (\w+) \| ([^|]*)\|", page, re.MULTILINE)
    documented = {name: (kind, frozenset(re.findall(r"`(\w+)`", labels.split(":")[0]))) for name, kind, labels in rows}
    parts = {re.sub(r"_(bucket|sum)$", "_count", name): each for name, each in found.items()}
    whole = {re.sub(r"_count$", "", name): (kind, labels - {"le"}) for name, (kind, labels) in parts.items()}
    assert documented == whole
    queries = [rule["expr"] for rule in rules().values()]
    queries += [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]
    queries += [variable["query"]["query"] for variable in dashboard()["templating"]["list"][1:]]
    for query in queries:
        used = re.findall(r"(ddpjob_\w+)(?:\{(.*?)\})?", re.sub(r'"[^"]*"', "", query))
        assert used, query
        for name, matchers in used:
            # Prometheus adds the namespace and the Service of the operator to series without such labels.
            labels = found[name][1] | {"namespace", "job"}
            assert set(re.findall(r"\w+", matchers)) <= labels, query
        grouped = {label for by in re.findall(r"by \((.*?)\)", query) for label in by.split(", ")}
        assert grouped <= {"pod"}.union(*(found[name][1] for name, _ in used)), query


def test_each_panel_has_a_data_source_a_unit_and_valid_queries_and_overlaps_no_other(tmp_path: Path) -> None:
    panels = dashboard()["panels"]
    assert [panel["title"].split()[0] for panel in panels if panel["type"] == "row"] == ["Fleet", "Jobs", "Operator"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    records = []
    for panel in panels:
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}" and panel["fieldConfig"]["defaults"]["unit"]
            assert panel["targets"], panel["title"]
            records += [{"record": f"panel:{len(records)}", "expr": target["expr"]} for target in panel["targets"]]
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in itertools.combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert beside or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"], (one, other)
    assert promtool(tmp_path, "check", "rules", "panels.yaml", panels=groups(*records)) == ""
