"""Renders the YAML skeletons under ``templates/``; no value can change their structure.

Every ``{{ }}`` is JSON-encoded by the environment's ``finalize`` hook, and JSON is YAML: an environment value of
``"}\\nhostNetwork: true`` or ``no`` arrives as that very string. Undefined names are errors.
"""

import json
import re
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from ddpjob.api.wire import Json

# What YAML refuses raw, or folds as a line break, inside a double-quoted scalar though JSON leaves it as it is.
# Everything else stays UTF-8: PyYAML reads an emoji escaped by JSON as two lone surrogates.
_NOT_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _encode(value: Any) -> str:
    if isinstance(value, StrictUndefined):
        return str(value)  # raises UndefinedError, which names the variable
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _NOT_YAML.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


_ENVIRONMENT = Environment(
    loader=PackageLoader("ddpjob.engine"),
    undefined=StrictUndefined,
    finalize=_encode,
    trim_blocks=True,
    lstrip_blocks=True,
    autoescape=False,  # the output is YAML, not HTML; `finalize` does the escaping  # noqa: S701
)


def render(template: str, **values: Any) -> Json:
    """The object that ``templates/<template>`` describes, with ``values`` in it.

    Raises:
        jinja2.UndefinedError: the template names a value that was not given (a bug of ours).
    """
    text = _ENVIRONMENT.get_template(template).render(**values)
    rendered = yaml.load(text, Loader=_Loader)  # a safe loader, the C one where libyaml is there  # noqa: S506
    if not isinstance(rendered, dict):
        raise TypeError(f"{template} must render one object, not {type(rendered).__name__}")
    return rendered
