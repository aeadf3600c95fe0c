"""Generate docs/reference/fields.md from the models of the resource."""

from collections.abc import Iterator
from typing import Any

from ddpjob.api import names
from ddpjob.api.spec import IMMUTABLE, NAME_RULE, SIZE, DDPJobSpec
from ddpjob.api.status import DDPJobStatus

Schema = dict[str, Any]

HEAD = f"""\
# Fields of a DDPJob

<!-- Generated from operator/ddpjob/api by `make generate`; do not edit. -->

`apiVersion: {names.API_VERSION}`, `kind: {names.DDPJOBS.kind}`, short name `ddp`. The same text is in the cluster:
`kubectl explain ddpjob.spec`. Unknown fields are refused by `kubectl apply` and, where a client asks for no
validation, dropped.

- **{NAME_RULE.message}.**
- *Fixed* fields, with all that is in them, cannot be added, changed or removed once the job exists: delete the job and
  apply it again. Its checkpoints stay, and the new job resumes from them. *Changeable* fields may be edited at any
  time, others while the job is suspended and in the edit that suspends it.
- Types without a link are as everywhere in Kubernetes, or the operator's own: see
  `kubectl explain ddpjob.spec.env.valueFrom`.
- A quantity is a number with or without a unit, as everywhere in Kubernetes: `500m`, `4`, `16Gi`.
"""


_NESTED = {path.rpartition(".")[2] for path in IMMUTABLE if "." in path}
"""Immutable fields of objects that are not immutable as a whole."""
_MARKS = {name: "fixed" for name in IMMUTABLE if "." not in name} | dict.fromkeys(SIZE, "while suspended")
"""What may change of a live job, by the field of the spec."""


_EXPLAINED = {
    *("CurrentAttempt", "RefusedStart", "InPlace", "LifeFailure", "Size", "Ending", "Nodes"),
    *("EnvValueSource", "KeySelector", "FieldSelector", "ResourceFieldSelector", "ObjectReference", "LocalReference"),
    "NamedEntry",
}
"""What only the operator reads, and what is as everywhere in Kubernetes: `kubectl explain` describes it."""


def reference() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for title, model in (("spec", DDPJobSpec), ("status", DDPJobStatus)):
        schema = model.model_json_schema(by_alias=True)
        parts += [f"## {title}\n", *_sections(schema, title)]
    return "\n".join(parts).rstrip() + "\n"


def _sections(root: Schema, title: str) -> Iterator[str]:
    defs = root.get("$defs", {})
    changeable = _changeable(root, defs)
    is_spec = title == "spec"
    yield _object(root, defs, dict.fromkeys(root["properties"], "changeable") | _MARKS if is_spec else None)
    for name in in_order_of_use(root, defs):
        if name in _EXPLAINED:
            continue
        yield f"### {name}\n"
        nested = _NESTED & set(defs[name].get("properties", {})) if changeable[name] else set()
        yield _object(defs[name], defs, dict.fromkeys(nested, "fixed") if is_spec else None)


def _object(schema: Schema, defs: Schema, marks: dict[str, str] | None) -> str:
    """Return the text of one object and the list of its fields.

    ``marks`` says which fields may change of a live job; it is None for the status, which users do not write.
    """
    lines = [" ".join(schema.get("description", "").split()), ""]
    for name, field in schema.get("properties", {}).items():
        facts = [type_of(field)]
        if marks is not None:
            facts += [_default(name, field, schema), _limits(field), f"*{marks[name]}*" if name in marks else ""]
        lines.append(f"- `{name}` ({'; '.join(fact for fact in facts if fact)}): {_line(meaning_of(field, defs))}")
    if marks is not None and schema.get("additionalProperties") is True:
        lines += ["", "Other fields of Kubernetes are passed on untouched."]
    rules = [rule["message"] for rule in schema.get("x-kubernetes-validations", ()) if "oldSelf" not in rule["rule"]]
    if rules:
        lines += ["", "Rules:", "", *(f"- {rule}." for rule in rules)]
    return "\n".join(lines) + "\n"


def meaning_of(field: Schema, defs: Schema) -> str:
    """Return the field's description. pydantic omits it if it equals the description of the field's type."""
    reference = plain(field).get("$ref", "").rsplit("/", 1)[-1]
    text: str = field.get("description") or defs.get(reference, {}).get("description", "")
    return text


def plain(field: Schema) -> Schema:
    """Return the field without its null alternative."""
    options = [option for option in field.get("anyOf", ()) if option.get("type") != "null"]
    if len(options) == 1:
        merged: Schema = options[0] | {key: value for key, value in field.items() if key != "anyOf"}
        return merged
    return field


def type_of(field: Schema) -> str:
    """Return the type of a field, with links to the headings of objects."""
    field = plain(field)
    if "$ref" in field:
        name = field["$ref"].rsplit("/", 1)[-1]
        return f"`{name}`" if name in _EXPLAINED else f"[{name}](#{name.lower()})"
    if field.get("x-kubernetes-int-or-string"):
        names = [f"`{option['const']}`" for option in field["anyOf"] if "const" in option]
        return f"integer or {names[0]}" if names else "quantity"
    if "anyOf" in field:
        return ", ".join(type_of(option) for option in field["anyOf"])
    if "enum" in field or "const" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum") or [field["const"]])
    if field.get("type") == "array":
        return f"list of {type_of(field['items'])}"
    if isinstance(field.get("additionalProperties"), dict):
        return f"map to {type_of(field['additionalProperties'])}"
    if field.get("format") == "date-time":
        return "time"
    return str(field.get("type", "object"))


def _default(name: str, field: Schema, schema: Schema) -> str:
    if name in schema.get("required", ()):
        return "*required*"
    default = field.get("default")
    if default is None or isinstance(default, dict):
        return ""
    return f"default `{str(default).lower() if isinstance(default, bool) else default}`"


def _limits(field: Schema) -> str:
    field = plain(field)
    limits = []
    if "minimum" in field or "maximum" in field:
        limits.append(f"{field.get('minimum', '')} … {field.get('maximum', '')}")
    if field.get("maxLength"):
        limits.append(f"≤ {field['maxLength']} characters")
    if field.get("maxItems") or field.get("maxProperties"):
        limits.append(f"≤ {field.get('maxItems') or field['maxProperties']} entries")
    quantity = field.get("x-kubernetes-int-or-string") and field.get("pattern")
    if field.get("pattern") and not quantity:
        limits.append(f"`{field['pattern']}`")
    limits += [_line(rule["message"]) for rule in field.get("x-kubernetes-validations", ())]
    return "; ".join(limits)


def _line(text: str) -> str:
    return " ".join(text.split())


def cell(text: str) -> str:
    """Return a text for a table."""
    return _line(text).replace("|", "\\|")


def _refs(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"].rsplit("/", 1)[-1]
        for value in node.values():
            yield from _refs(value)
    elif isinstance(node, list):
        for value in node:
            yield from _refs(value)


def in_order_of_use(root: Schema, defs: Schema) -> list[str]:
    """Return the types that the properties of an object use, also in other types."""
    order: list[str] = []
    queue = list(_refs(root.get("properties", {})))
    while queue:
        name = queue.pop(0)
        if name not in order:
            order.append(name)
            queue += list(_refs(defs[name]))
    return order


def _changeable(root: Schema, defs: Schema) -> dict[str, bool]:
    """Return for each object whether only changeable fields of the spec use it."""
    under: dict[str, set[bool]] = {}
    for name, field in root.get("properties", {}).items():
        for used in in_order_of_use({"properties": {name: field}}, defs):
            under.setdefault(used, set()).add(name not in IMMUTABLE)
            for inner, part in defs[used].get("properties", {}).items():
                if inner in _NESTED:
                    for below in in_order_of_use({"properties": {inner: part}}, defs):
                        under[below] = {False}
    return {name: marks == {True} for name, marks in under.items()}
