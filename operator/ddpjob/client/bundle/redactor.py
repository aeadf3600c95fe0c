"""Redaction: removes values of variables, annotations and what looks like a secret; hides names on request.

The plan of a redacted job is that of the job: keys, names of variables, kinds, reasons and numbers stay, and a text
that is JSON stays JSON. A name is replaced by the same pseudonym everywhere.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ddpjob.api import names
from ddpjob.api.objects import Json

MARK = "[redacted]"

# Variables that the operator sets; but for the token, their values follow from the job.
_OWN_VARIABLES = (names.OWNED_ENV - {names.ENV_TOKEN}) | {
    *(names.ENV_RANK, names.ENV_WORLD_SIZE, names.ENV_LOCAL_RANK, names.ENV_LOCAL_WORLD_SIZE),
    *(names.ENV_RDZV_ID, names.ENV_INPLACE_RESTARTS, names.ENV_STOP_GRACE, names.ENV_LEADER_PORT),
    *(names.ENV_STARTUP_DEADLINE, names.ENV_PROGRESS_DEADLINE, names.ENV_COMPLETION_GRACE),
}
_WORDS = (
    r"token|secret|passw(?:or)?d|passphrase|(?<=[_-])pwd|api[_.-]?key|access[_.-]?key|secret[_.-]?key|private[_.-]?key"
    r"|credential|authorization|cookie|(?<=amz-)signature|(?<=goog-)signature"
    r"|(?<![A-Za-z])pass|(?-i:(?<=[a-z])Pass)"
)
_NAMED = rf"[\w.-]{{0,64}}?(?:{_WORDS})s?(?![A-Za-z])[\w-]{{0,64}}"
_IS_VARIABLE = re.compile(rf"(?i){_NAMED}$")
_IS_KEY = re.compile(rf"(?i)[\w.-]{{0,64}}?(?:{_WORDS})s?$")
_IS_FLAG = re.compile(rf"(?i)--?{_NAMED}$")
_COMMA = r",(?![\s\"'}\])]|[\w.-]{1,64}[\"']?\s?[=:]|$)"
"""A comma within a value; another one separates it from the next name."""
_EXPANDED = r"\$\(\w+\)|\$\{\w+\}"
_VALUE = rf"(\"[^\"\n]*\"|'[^'\n]*'|(?!\[redacted\]|(?:Bearer|Basic|Token) )(?:{_EXPANDED}|[^\s,;&\"'}}\])]|{_COMMA})+)"
_ASSIGNED = re.compile(rf"(?i)(?<![\w.-])(-{{0,2}}{_NAMED})(\"?'?\s?=\s?|\"?'?: ?)((?:Bearer |Basic |Token )?){_VALUE}")
_FLAGGED = re.compile(rf"(?i)(?<!\S)(--{_NAMED})(\s+)()(?!-){_VALUE}")
_HARMLESS = re.compile(rf"(?i)[\"']?(true|false|none|null|{_EXPANDED})[\"']?$")
_NUMBER = re.compile(r"(?i)[\"']?(-?[\d.]+(e[+-]?\d+)?|nan)[\"']?$")
_IS_MEASURE = re.compile(
    r"(?i)tokens(?![a-z])|token[_-](?:count|ids?|accuracy|length|loss)(?![a-z])|per[_-]token"
    r"|(?:forward|backward)[_-]pass|pass[_-]rate"
)
"""Names with the word of a secret whose numbers are none."""
_LOGIN_FLAGS = frozenset({"-u", "--user"})
_LOGIN = r"(?!\d+:\d+(?!\S))[^\s:\"']{1,256}:[^\s\"']+"
"""user:password, but not the numbers of a user and a group."""
_IS_EXCEPTION = re.compile(r"(Error|Exception|Warning)$")
_PATTERNS = tuple(
    re.compile(pattern)
    for pattern in (
        r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)",
        r"\beyJ[\w-]{8,}\.[\w-]{4,}\.[\w-]*",  # a JSON web token
        r"(?i)(?<=bearer )(?!\[redacted\])[\w.~+/=-]{8,}",
        r"\b(?:gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|hf_\w{16,}|npm_\w{16,}|dckr_pat_[\w-]{16,})",
        r"\b(?:sk|pk|rk)-(?=[\w-]*[A-Z])(?=[\w-]*\d)[\w-]{16,}|\bxox[a-z]-[\w-]{10,}|\bAIza[\w-]{30,}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
        r"(?<=://)(?!\[redacted\]@)[^/\s@:\"']{0,256}:[^/\s@\"']{1,256}(?=@)",  # user:password@ of a URL
        rf"(?:(?<=\s-u )|(?<=\s--user )|(?<=\s--user=))[\"']?{_LOGIN}[\"']?",
        r"(?i)(?<=cookie: )(?!\[redacted\])[^\n\"']+",
    )
)
_MIN_SECRET = 4
_MIN_NUMBER = 6
"""A shorter number would also be found in times."""
_TOKEN = re.compile(r"(?=.*[0-9])(?=.*[a-z])(?=.*[A-Z])[\w+=~-]{20,}|[0-9a-f]{32,}")
"""Values that look random; names and paths of Kubernetes objects do not."""

# Values of these keys are words of Kubernetes and of this project, never names.
_VOCABULARY = frozenset(
    {
        *("kind", "apiVersion", "reason", "type", "phase", "state", "status", "verdict", "action", "cause", "outcome"),
        *("exception", "operator", "effect", "key", "policy", "restartPolicy", "level", "logger", "uid", "event"),
        *("terminationMessagePolicy", "imagePullPolicy", "protocol", "qosClass", "subresource", "manager", "fieldPath"),
        *("resourceVersion", "managedBy", "successPolicy", "podRetention", "launcher", "networkPolicy", "profile"),
    }
)
# Fields that hold the name of an object or a path: a plan needs them, also if a variable has the same value.
_REFERENCES = frozenset(
    {
        *("name", "namespace", "claimName", "secretName", "serviceAccountName", "nodeName", "hostname", "subdomain"),
        *("image", "imageID", "mountPath", "subPath", "path", "workingDir", "volumeName", "storageClassName"),
    }
)
# A field `name` is that of an object below these keys; elsewhere it names a container, a variable, a port or a volume.
_OBJECTS = re.compile(r"(?:metadata|ownerReferences|involvedObject|imagePullSecrets|related|\w*Ref|secret|configMap)$")


class Redactor:
    """Removes secrets from JSON and text. removed: how many of each kind.

    secrets: values that are removed everywhere. pseudonyms: the replacement of each name.
    """

    def __init__(self, secrets: Collection[str] = (), pseudonyms: Mapping[str, str] | None = None) -> None:
        self.removed: Counter[str] = Counter()
        self._secrets = _any_of(secrets)
        self._pseudonyms = pseudonyms or {}
        self._names = _any_of(self._pseudonyms, whole=True)

    def object(self, value: Json) -> Json:
        """Return an API object without secrets."""
        redacted: Json = self._value(value, "", "", is_text=False)
        return redacted

    def text(self, text: str) -> str:
        """Return a text without secrets. A JSON object in it stays JSON; a log may have one in each line."""
        if "\n" not in text.rstrip("\n") or "-----BEGIN" in text or _document(text) is not None:
            return self._line(text)
        return "".join(self._line(line) for line in text.splitlines(keepends=True))

    def rename(self, name: str) -> str:
        """Return a name, or a text with names, with pseudonyms."""
        return self._names.sub(lambda match: self._pseudonyms[match.group()], name) if self._names else name

    def _value(self, value: Any, key: str, parent: str, *, is_text: bool) -> Any:
        """Return a value without secrets.

        parent: the key of the object that has the value below ``key``.
        is_text: in a text any program may have written the JSON, and any of its keys may have a secret.
        """
        if isinstance(value, str):
            return self._string(value, key) if is_text else self._field(value, key, parent)
        if isinstance(value, list):
            return [self._value(item, "", key, is_text=is_text) for item in self._arguments(value)]
        if not isinstance(value, dict):
            return self._number(value, key) if is_text else value
        found: Json = {}
        for name, item in value.items():
            if name == "managedFields":
                continue  # names of fields, which say nothing here
            if name == "annotations" and isinstance(item, dict):
                found[name] = {label: self._mark("annotations", text) for label, text in item.items()}
            elif name == "env" and isinstance(item, list):
                found[name] = [self._variable(variable, is_text=is_text) for variable in item]
            else:
                found[name] = self._value(item, name, key or parent, is_text=is_text)
        return found

    def _variable(self, variable: Any, *, is_text: bool) -> Any:
        if not isinstance(variable, dict) or variable.get("name") in _OWN_VARIABLES or "value" not in variable:
            return self._value(variable, "", "env", is_text=is_text)
        return variable | {"value": self._mark("envValues", variable["value"])}

    def _arguments(self, words: list[Any]) -> list[Any]:
        """Return a list in which the word after a flag such as ``--token`` is removed."""
        found: list[Any] = []
        flag = ""
        for word in words:
            is_text = isinstance(word, str)
            hidden = is_text and (
                (_IS_FLAG.match(flag) and not word.startswith("-") and not _is_harmless(flag, word))
                or (flag in _LOGIN_FLAGS and re.match(_LOGIN, word))
            )
            found.append(self._mark("secrets", word) if hidden else word)
            flag = word if is_text else ""
        return found

    def _field(self, text: str, key: str, parent: str) -> str:
        """Return a text of an API object. Words that the plan needs stay."""
        is_word = key in _VOCABULARY or (key == "name" and not _OBJECTS.match(parent))
        if is_word:
            return text
        return self.rename(text) if key in _REFERENCES else self._string(text, key)

    def _string(self, text: str, key: str) -> str:
        if key in _VOCABULARY and text in self._pseudonyms:
            return text  # in the report of a trainer, too, it is a word
        name = _snake(key)
        if _IS_KEY.match(name) and not _is_harmless(name, text):
            return str(self._mark("secrets", text))
        return self.text(text)

    def _number(self, value: Any, key: str) -> Any:
        shown, name = json.dumps(value), _snake(key)
        is_secret = _IS_KEY.match(name) and not _is_harmless(name, shown)
        if is_secret or (self._secrets is not None and self._secrets.fullmatch(shown)):
            return self._mark("secrets", shown)
        return value

    def _line(self, text: str) -> str:
        document = _document(text)
        if document is not None:
            redacted = self._value(document, "", "", is_text=True)
            if redacted == document:
                return text
            return json.dumps(redacted, ensure_ascii=text.isascii()) + ("\n" if text.endswith("\n") else "")
        return self._plain(text)

    def _plain(self, text: str) -> str:
        if self._secrets is not None:
            text = self._secrets.sub(self._count, text)
        for pattern in _PATTERNS:
            text = pattern.sub(self._count, text)
        for pattern in (_ASSIGNED, _FLAGGED):
            text = pattern.sub(self._assigned, text)
        return self.rename(text)

    def _assigned(self, match: re.Match[str]) -> str:
        name, separator, scheme, value = match.groups()
        if _is_harmless(name, value) or (separator.startswith(":") and _IS_EXCEPTION.search(name)):
            return match.group()
        return f"{name}{separator}{scheme}{self._count(match)}"

    def _count(self, _: re.Match[str]) -> str:
        self.removed["secrets"] += 1
        return MARK

    def _mark(self, kind: str, value: Any) -> Any:
        if not isinstance(value, str) or value in ("", MARK):
            return value
        self.removed[kind] += 1
        return MARK


def secret_values(objects: Iterable[Json]) -> set[str]:
    """Return the values of variables that are probably secret: by the variable's name, or because they look random.

    A value that is also a name of an object, or a path, is none.
    """
    found: set[str] = set()
    references: set[str] = set()
    level: list[Any] = list(objects)
    while level:
        item = level.pop()
        if isinstance(item, list):
            level += item
        elif isinstance(item, dict):
            variables = item.get("env")
            for variable in variables if isinstance(variables, list) else ():
                if isinstance(variable, dict) and _is_secret(variable):
                    found.add(str(variable["value"]))
            references |= {str(value) for key, value in item.items() if key in _REFERENCES}
            level += item.values()
    return found - references


def _is_secret(variable: Json) -> bool:
    name, value = str(variable.get("name")), variable.get("value")
    if not isinstance(value, str) or name in _OWN_VARIABLES or _is_harmless(name, value):
        return False
    if _NUMBER.match(value):
        return _IS_VARIABLE.match(name) is not None and len(value) >= _MIN_NUMBER
    return len(value) >= _MIN_SECRET and (_IS_VARIABLE.match(name) is not None or _TOKEN.fullmatch(value) is not None)


def _is_harmless(name: str, value: str) -> bool:
    """Return whether a value is no secret although the name is that of one."""
    return bool(_HARMLESS.match(value) or (_NUMBER.match(value) and _IS_MEASURE.search(name)))


def _snake(key: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key)


def _document(text: str) -> Json | None:
    if not text.lstrip().startswith("{"):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _any_of(words: Iterable[str], *, whole: bool = False) -> re.Pattern[str] | None:
    """Return what matches one of the words, the longest first; whole, or a number: not within a longer word."""
    ordered = sorted(filter(None, words), key=lambda word: (-len(word), word))
    given = "|".join(
        rf"(?<![\w.]){re.escape(word)}(?!\w)" if _NUMBER.match(word) else re.escape(word) for word in ordered
    )
    if not given:
        return None
    return re.compile(rf"(?<![A-Za-z0-9_])(?:{given})(?![A-Za-z0-9_])" if whole else given)
