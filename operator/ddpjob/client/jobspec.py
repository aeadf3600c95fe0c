"""The spec of a ``DDPJob``: its checks, its keyword arguments, and the short words of the command line in it.

Apart from ``job``, because listing the jobs of a cluster checks none: importing the models of the spec takes as long as
the request.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from ddpjob.api.objects import Json
from ddpjob.api.pods import is_object_name
from ddpjob.api.quantities import amount
from ddpjob.api.spec import DDPJobSpec, explain, forbidden_changes
from ddpjob.engine.merge import merge
from ddpjob.errors import InvalidJobError, did_you_mean

_REFERENCE = "docs/reference/fields.md lists every field and what it may hold"
_CORRECT = "correct the field"
_GPU = "nvidia.com/gpu"
_SIZE = re.compile(r"[0-9]+(\.[0-9]+)?([KMGTPE]i|[MGTPE])")
_LIKE_A_SIZE = re.compile(r"[0-9]+(\.[0-9]+)?[A-Za-z]{0,2}")  # 10gi is no size, but also a valid name of a claim


_ALIASES = {key: field.alias or key for key, field in DDPJobSpec.model_fields.items()}
_WORDS = {"gpus": "gpus", "max_restarts": "maxRestarts", "memory": "memory"}


def changed_spec(name: str, spec: Json, patch: Json) -> Json:
    """Return a stored spec after a JSON merge patch (RFC 7386). Raises ``InvalidJobError`` for a fixed field."""
    made = _patched(spec, patch)
    if wrong := forbidden_changes(spec, made):
        raise InvalidJobError(
            f"the job {name} cannot change in this way: {'; '.join(wrong)}",
            _REFERENCE,
            f"ddpjob get {name} -o yaml shows it",
        )
    return made


def _patched(value: Any, patch: Json) -> Json:
    made: Json = dict(value) if isinstance(value, dict) else {}
    for key, item in patch.items():
        made[key] = _patched(made.get(key), item) if isinstance(item, dict) else item
    return {key: item for key, item in made.items() if item is not None}


def spec_of(name: str, given: Mapping[str, Any]) -> Json:
    """Return the spec as JSON, with the names of the API. Raises ``InvalidJobError``."""
    known = _ALIASES | _WORDS
    known |= {alias: alias for alias in known.values()}
    values: Json = {}
    words: Json = {}
    for key, value in given.items():
        if key not in known:
            hint = did_you_mean(key, sorted(known), _REFERENCE)
            raise InvalidJobError(f'a DDPJob has no field "{key}"', hint, "options of the trainer belong into args")
        if twin := next((other for other in (*values, *words) if known[other] == known[key]), None):
            raise InvalidJobError(f"{twin} and {key} are one field", "it is given twice", "leave out one of them")
        is_word = known[key] in _WORDS.values() or (key == "checkpoint" and isinstance(value, str))
        is_word = is_word or (key == "env" and isinstance(value, Mapping))
        if value is not None:
            (words if is_word else values)[key] = _json(value)
    try:
        spec = DDPJobSpec.model_validate(values, by_alias=True, by_name=True)
    except ValidationError as error:
        raise InvalidJobError(
            f"the DDPJob {name} is wrong: {'; '.join(explain(error))}", _REFERENCE, _CORRECT
        ) from error
    made = spec.model_dump(by_alias=True, exclude_unset=True, exclude_none=True)
    return with_words(made, {known[key]: value for key, value in words.items()})


def with_words(spec: Json, words: Mapping[str, Any]) -> Json:
    """Return the spec with fields, and with the short words of the command line and of ``DDPJob``; None is left out.

    Args:
        words: ``gpus`` and ``memory`` of each node, ``maxRestarts``, ``checkpoint`` as ``SIZE[:CLASS]`` or CLAIM,
            ``env`` as NAME=VALUE or a mapping; others are fields.

    Raises:
        InvalidJobError: a value is not of its form.
    """
    given = {key: value for key, value in words.items() if value is not None}
    gpus, restarts, memory = (given.pop(word, None) for word in _WORDS.values())
    parts: Json = {"restartPolicy": None if restarts is None else {"maxRestarts": restarts}}
    if memory is not None and (meant := too_small(memory)):
        raise InvalidJobError(f"memory {memory}: this is less than 1 MiB", "Kubernetes counts bytes", f"{meant}?")
    if limits := {key: value for key, value in ((_GPU, gpus), ("memory", memory)) if value is not None}:
        known = spec.get("resources")
        requested = known.get("requests") if isinstance(known, dict) else None
        # Kubernetes refuses a request of a device that differs from its limit.
        own = ["memory", *(requested if isinstance(requested, dict) else ())]
        requests = {key: value for key, value in limits.items() if key in own}
        parts["resources"] = {"limits": limits} | ({"requests": requests} if requests else {})
    if (env := given.pop("env", None)) and isinstance(spec.get("env") or [], list):
        parts["env"] = _variables(env)
    merged = merge(spec, parts | given)
    if isinstance(volume := given.get("checkpoint"), str):
        nodes = merged.get("numNodes", 1)
        merged["checkpoint"] = _volume(volume, spec.get("checkpoint"), is_shared=nodes != 1)
    return merged


def too_small(memory: object) -> str | None:
    """Return what is probably meant by a memory below 1 MiB: a number without a unit has bytes, and ``m`` is 1/1000."""
    number = re.match(r"[0-9.]+", str(memory))
    try:
        if number is None or not 0 < amount(str(memory)) < 2**20:
            return None
    except ValueError:  # no quantity, which is refused with its field
        return None
    return f"{number[0]}{'Gi' if float(number[0]) < 256 else 'Mi'}"


def _volume(text: str, known: Any, *, is_shared: bool) -> Json:
    """Return ``spec.checkpoint`` with a claim to create, or with an existing one."""
    size, _, storage_class = text.partition(":")
    kept = known if isinstance(known, dict) else {}
    kept = {key: value for key, value in kept.items() if key not in ("claimName", "claimTemplate")}
    if _SIZE.fullmatch(size):
        access = "ReadWriteMany" if is_shared else "ReadWriteOnce"
        claim: Json = {"spec": {"accessModes": [access]}}
        if isinstance(known, dict) and isinstance(known.get("claimTemplate"), dict):
            claim = merge(claim, known["claimTemplate"])  # the words change only what they name
        if is_shared and {*claim["spec"]["accessModes"]} <= {"ReadWriteOnce", "ReadWriteOncePod"}:
            claim["spec"]["accessModes"] = [access]  # no pod of another node could mount it
        named = {"resources": {"requests": {"storage": size}}, "storageClassName": storage_class or None}
        return kept | {"claimTemplate": merge(claim, {"spec": named})}
    if _LIKE_A_SIZE.fullmatch(size) or not is_object_name(text):
        raise InvalidJobError(
            f"checkpoint {text!r} is neither a size nor the name of a claim",
            "a size makes a volume, with the cluster's storage class or another; a name is that of an existing claim",
            "for example 10Gi, 10Gi:my-storage-class or my-claim",
        )
    return kept | {"claimName": text}


def _variables(given: Sequence[str] | Mapping[str, Any]) -> list[Json]:
    """Return the entries of ``spec.env`` for NAME=VALUE, or for a mapping."""
    if not isinstance(given, Mapping):
        pairs = [text.partition("=") for text in given]
        for name, equals, _ in pairs:
            if not (name and equals):
                raise InvalidJobError(f"env {name or '='}: it is not NAME=VALUE", "a part is missing", "LOG_LEVEL=info")
        given = {name: value for name, _, value in pairs}
    require_texts("env", given)
    return [{"name": name, "value": value} for name, value in given.items()]


def require_texts(what: str, values: Mapping[str, Any]) -> None:
    """Raise ``InvalidJobError`` if a value of a mapping is not text."""
    for key, value in values.items():
        if not isinstance(value, str):
            text = str(value).lower() if isinstance(value, bool) else value
            raise InvalidJobError(
                f"{what} {key} is {value!r}, not text", "Kubernetes takes text only", f'write "{text}"'
            )


def _json(value: Any) -> Any:
    """Return a value as JSON has it: a tuple as a list, and a model as its fields."""
    if isinstance(value, BaseModel):
        return value.model_dump(by_alias=True, exclude_unset=True, exclude_none=True)
    if isinstance(value, Mapping):
        return {key: _json(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_json(item) for item in value]
    return value
