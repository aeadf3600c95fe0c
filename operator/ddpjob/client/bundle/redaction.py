"""What of a snapshot may be given away, by the kind of each field; no pattern looks for secrets.

A field is kept if only Kubernetes, the operator or a validated name can be its value, and only in the form of such a
value. Every other string is replaced by a mark, which is the same for the same value within one bundle. Texts that a
program may have written (logs, termination messages, what the status quotes of them) are in a bundle only on request.
"""

import hmac
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ddpjob.api import names
from ddpjob.api.model import WireModel
from ddpjob.api.objects import Json
from ddpjob.api.time_spent import is_time
from ddpjob.client.snapshot import Snapshot

_NAMES = (
    "name namespace uid hostname subdomain nodeName nominatedNodeName claimName secretName volumeName pod container "
    "serviceAccountName serviceAccount storageClassName runtimeClassName priorityClassName schedulerName queueName "
    "topologyKey driver controller key mountPath image imageID"
)
"""Fields with names of objects and of their parts, which the API server validates."""
_WORDS = (
    "kind type status reason state verdict action effect operator phase current protocol policyTypes accessModes "
    "volumeMode restartPolicy imagePullPolicy dnsPolicy preemptionPolicy terminationMessagePolicy whenUnsatisfiable "
    "profile onDivergence successPolicy podRetention claimRetention managedBy onReasons sizeLimit "
    "qosClass component reportingComponent source launcher networkPolicy fieldPath resource event podIP hostIP ip "
    "clusterIP masterAddress apiVersion apiGroup resourceVersion nodesReady fromProgram cause outcome exception"
)
"""Fields with words of Kubernetes and of the operator, addresses, versions, and the class of an exception."""
_KEPT = frozenset(f"{_NAMES} {_WORDS}".split())
_NAME = re.compile(r"[\w/][\w.:/+-]{0,252}(@sha256:[0-9a-f]{64})?", re.ASCII)
_KEY = re.compile(r"[A-Za-z_][\w./-]{0,120}", re.ASCII)
_PHASE = re.compile(r"[A-Za-z_]{1,20}", re.ASCII)
"""Phases that a program reports are texts of its own; those of ddprun and of the operator are short words."""
_NUMBERS = frozenset({"loss", "accuracy", "samplesPerSecond", "stepsPerSecond", "stepSeconds"})
_NUMBER = re.compile(r"-?(\d+(\.\d+)?(e[+-]?\d+)?|nan|inf)", re.ASCII)
_AMOUNTS = frozenset({"limits", "requests", "capacity", "hard", "used", "allocatedResources"})
_AMOUNT = re.compile(r"\d+(\.\d+)?([EPTGMk]i?|[mun]|Ki)?", re.ASCII)
_LABELS = frozenset({"labels", "matchLabels", "nodeSelector", "selector"})
_DOMAIN = re.compile(rf"([\w.-]+\.)?(kubernetes\.io|k8s\.io|{re.escape(names.GROUP)})/[\w.-]+", re.ASCII)
_OWN_DOMAIN = f"{names.GROUP}/"
_OWN = frozenset(
    value
    for name, value in vars(names).items()
    if name.startswith(("LABEL_", "ANNOTATION_")) and isinstance(value, str)
)
"""Labels and annotations that the operator writes; one of its domain with another name is of the user."""
_SCRIPT = re.compile(r"[\w./-]+\.py", re.ASCII)
_VARIABLES = names.OWNED_ENV - {names.ENV_TOKEN}
"""What the operator sets in each pod; but for the token, their values follow from the job."""
_SETTINGS = "DDPJOB_OPERATOR_"
"""Prefix of the variables of the operator's own pods."""
_VALUES = frozenset({"value", "values"})
_ATTRIBUTES = frozenset({"volumeAttributes", "options", "parameters"})
"""Fields with maps in which drivers of storage take passwords."""
_REPORT = frozenset({"schema", "cause", "outcome", "kind", "code", "exception", "signal", "rank", "step", "node"})
_PRINTED = frozenset({"cause", "outcome", "kind", "exception"})
"""Fields of a report of ddprun, and those of them with words."""
_WORD = re.compile(r"[A-Za-z_][\w.]{0,80}", re.ASCII)
_TEXTS = frozenset({"message", "note", "hint", "next", "where", "logTail", "display"})
_OF_PODS = (
    "Unschedulable SchedulerError SchedulingGated ContainersNotReady ContainersNotInitialized PodCompleted "
    "PreemptionByScheduler DeletionByTaintManager EvictionByEvictionAPI DeletionByPodGC TerminationByKubelet "
    "ErrImagePull ImagePullBackOff InvalidImageName ErrImageNeverPull ImageInspectError RegistryUnavailable "
    "CreateContainerConfigError ContainerCreating PodInitializing CrashLoopBackOff"
)
_OF_EVENTS = (
    "Scheduled FailedScheduling Preempted Nominated NotTriggerScaleUp TriggeredScaleUp Pulling Pulled Created Started "
    "BackOff FailedMount FailedAttachVolume SuccessfulAttachVolume FailedBinding ProvisioningFailed Provisioning "
    "ProvisioningSucceeded ExternalProvisioning WaitForFirstConsumer FailedCreatePodSandBox NetworkNotReady "
    "NodeNotReady TaintManagerEviction Evicted Killing"
)
_KUBERNETES = frozenset(f"{_OF_PODS} {_OF_EVENTS}".split())
"""Reasons whose texts Kubernetes writes about objects. Others may quote a command line, a probe or an exception."""
_OPTION = re.compile(r"(?:^|\s)-[\w-]*(?:=|\s+)[\"']?([^\s\"']+)|\w=[\"']?([^\s\"']+)")
"""The value after a flag or an assignment in a line of a shell."""
_COMMAND_LINE = re.compile(r"\n|Mounting (command|arguments)|\s-o")
"""Where a text about a volume begins to quote the options of a mount."""
_URL = re.compile(r"(https?://)(?:[^\s\"/@]*@)?([^\s\"?]*)(?:\?[^\s\"]*)?")
"""A URL: in its user and in its query are credentials, for example in an address that a registry has signed."""
_SHORTEST = 6
"""A shorter value is also found where it is none."""


class Redaction(WireModel):
    """How much was removed."""

    hidden: int
    """Texts that are replaced by a mark: values of variables, arguments, headers, attributes, and what is not known."""
    left_out: int
    """Annotations, labels of others, and fields whose names are no names of fields."""
    logs: bool
    """Whether logs, and what programs wrote into messages, are in the bundle."""


def redacted(snapshot: Snapshot, key: bytes, *, logs: bool) -> tuple[Snapshot, Redaction]:
    """Return the snapshot as it may be given away, and how much was removed.

    key: random, and not kept: with it the marks of short values could be found by trial.
    logs: keep logs and other words of programs, without the values that are hidden elsewhere.
    """
    first = Redactor(key, programs=logs)
    _redacted(snapshot, first)
    redactor = Redactor(key, programs=logs, values=first.values)
    return _redacted(snapshot, redactor), Redaction(hidden=redactor.hidden, left_out=redactor.left_out, logs=logs)


def _redacted(snapshot: Snapshot, redactor: "Redactor") -> Snapshot:
    def all_(objects: Iterable[Json] | None) -> list[Json]:
        return [redactor.redacted(one) for one in objects or ()]

    logs = snapshot.logs if redactor.programs else {}
    return replace(
        snapshot,
        job=redactor.redacted(snapshot.job, of_kubernetes=False),
        pods=None if snapshot.pods is None else all_(snapshot.pods),
        claims={name: claim and redactor.redacted(claim) for name, claim in snapshot.claims.items()},
        events=all_(snapshot.events),
        others=all_(snapshot.others),
        operators=None
        if snapshot.operators is None
        else [redactor.redacted(one, of_operator=True) for one in snapshot.operators],
        logs={pod: redactor.without_values(text) for pod, text in logs.items()},
        operator_log=redactor.without_values(snapshot.operator_log) if redactor.programs else "",
    )


class Redactor:
    """Replaces the strings of JSON that its fields do not allow.

    programs: texts that a program may have written are kept. values: what is removed from all texts.
    hidden, left_out: how many strings were replaced, and how many fields are missing.
    """

    def __init__(self, key: bytes, *, programs: bool, values: Iterable[str] = ()) -> None:
        self.programs = programs
        self.values: set[str] = set()
        self.hidden = self.left_out = 0
        self._key, self._of_kubernetes, self._of_operator = key, True, False
        self._longest_first = sorted(values, key=lambda value: (-len(value), value))

    def redacted(self, value: Json, *, of_kubernetes: bool = True, of_operator: bool = False) -> Json:
        """Return a JSON object without the values of users.

        of_kubernetes: its reasons are words of Kubernetes. Those of a DDPJob may be chosen by a program.
        of_operator: it is a Deployment of the operator. A job may have variables with the names of its settings.
        """
        self._of_kubernetes, self._of_operator = of_kubernetes, of_operator
        return self._fields(value)

    def _fields(self, value: Mapping[str, Any]) -> Json:
        made: Json = {}
        for key, item in value.items():
            if key == "managedFields" or not _KEY.fullmatch(key):
                self.left_out += 1
            elif key == "annotations" or (key in _LABELS and isinstance(item, dict) and _is_flat(item)):
                made[key] = self._labels(item or {}, key)
            elif key in _AMOUNTS and isinstance(item, dict) and _is_flat(item):
                made[key] = {
                    name: self._formed(str(amount), _AMOUNT) for name, amount in item.items() if _KEY.fullmatch(name)
                }
            elif key in _ATTRIBUTES and isinstance(item, dict):
                made[key] = {name: self._hide(str(text)) for name, text in item.items() if _KEY.fullmatch(name)}
            elif key in ("command", "args") and isinstance(item, list):
                made[key] = [self._word(word, is_program=key == "command" and not at) for at, word in enumerate(item)]
            else:
                made[key] = self._value(item, key, value)
        return made

    def without_values(self, text: str) -> str:
        """Return a text of a program without the values that are hidden in objects."""
        for value in self._longest_first:
            text = text.replace(value, self._mark(value))
        return text

    def _value(self, value: Any, key: str, around: Mapping[str, Any]) -> Any:
        if isinstance(value, str):
            return self._string(value, key, around)
        if isinstance(value, list):
            return [self._value(item, key, around) for item in value]
        if isinstance(value, dict):
            return self._fields(value)
        return self._hide(str(value)) if key in _VALUES and value is not None else value

    def _string(self, text: str, key: str, around: Mapping[str, Any]) -> str:
        if key in _TEXTS:
            return self._text(text, key, around)
        if key in _VALUES:
            is_known = around.get("name") in _VARIABLES
            is_known = is_known or (self._of_operator and str(around.get("name")).startswith(_SETTINGS))
            is_known = is_known or _DOMAIN.fullmatch(str(around.get("key"))) is not None
            return self._formed(text, _NAME) if is_known else self._hide(text)
        if is_time(text):
            return text
        if key in _NUMBERS:
            return self._formed(text, _NUMBER)
        if key == "phase" and not self._of_kubernetes:
            return self._formed(text, _PHASE)
        is_kept = key in _KEPT or (key == "host" and "component" in around)  # of an event, not of a probe
        return self._formed(text, _NAME) if is_kept else self._hide(text)

    def _text(self, text: str, key: str, around: Mapping[str, Any]) -> str:
        """Return a text for a person. Of a termination message that is a report, the words and numbers stay."""
        if self.programs:
            return self.without_values(text)
        if (report := _document(text)) is not None and "cause" in report:
            return json.dumps({name: self._printed(item, name) for name, item in report.items() if name in _REPORT})
        if self._of_kubernetes and key == "message" and around.get("reason") in _KUBERNETES:
            return self.without_values(_URL.sub(r"\1\2", _COMMAND_LINE.split(text, maxsplit=1)[0]))
        return self._hide(text, is_value=False)

    def _printed(self, value: Any, key: str = "") -> Any:
        """Return JSON that a program wrote, with its numbers, and with texts in the few fields that are words."""
        if isinstance(value, dict):
            return {name: self._printed(item, name) for name, item in value.items() if _KEY.fullmatch(name)}
        if isinstance(value, list):
            return [self._printed(item, key) for item in value]
        is_kept = not isinstance(value, str) or (key in _PRINTED and _WORD.fullmatch(value))
        return value if is_kept else self._hide(value, is_value=False)

    def _labels(self, labels: Mapping[str, Any], field: str) -> Json:
        """Return those of Kubernetes and of the operator; of annotations those of the operator."""
        kept = {
            key: value for key, value in labels.items()
            if _DOMAIN.fullmatch(key) and (key in _OWN if key.startswith(_OWN_DOMAIN) else field != "annotations")
        }  # fmt: skip
        self.left_out += len(labels) - len(kept)
        for value in labels.keys() - kept.keys():
            self._note(str(labels[value]))
        return {key: value if is_time(str(value)) else self._formed(str(value), _NAME) for key, value in kept.items()}

    def _word(self, word: object, *, is_program: bool) -> str:
        """Return a word of a command line: the program, or the name of its script."""
        return self._formed(str(word), _NAME if is_program else _SCRIPT)

    def _formed(self, text: str, form: re.Pattern[str]) -> str:
        return text if form.fullmatch(text) else self._hide(text)

    def _hide(self, text: str, *, is_value: bool = True) -> str:
        if not text or text.startswith(_MARK):
            return text
        self.hidden += 1
        if is_value:
            self._note(text)
        return self._mark(text)

    def _note(self, text: str) -> None:
        """Remember a value to remove it from texts, and of a command line the values of its options."""
        options = (value for both in _OPTION.findall(text) for value in both)
        self.values |= {value for value in (text, *options) if len(value) >= _SHORTEST}

    def _mark(self, text: str) -> str:
        return f"{_MARK}{hmac.digest(self._key, text.encode(errors='replace'), 'sha256').hex()[:8]}"


_MARK = "hidden-"


def _is_flat(value: Mapping[str, Any]) -> bool:
    return not any(isinstance(item, dict | list) for item in value.values())


def _document(text: str) -> Json | None:
    if not text.lstrip().startswith("{"):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
