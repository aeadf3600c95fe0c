"""Render the YAML templates in ``templates/``; no value can change their structure.

The ``finalize`` hook encodes the value of every ``{{ }}`` as JSON, which is valid YAML: an environment variable with
the value ``"}\\nhostNetwork: true`` or ``no`` stays a string. Undefined names are errors.
"""

import json
import re
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from ddpjob.api.wire import Json

# Characters that JSON leaves unescaped, but that YAML forbids or folds as a line break in a double-quoted scalar.
# All others stay UTF-8, because PyYAML reads an emoji that JSON escaped as two lone surrogates.
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
    """Return the object that ``templates/<template>`` renders with ``values``.

    Raises:
        jinja2.UndefinedError: the template uses a value that was not given (a bug).
    """
    text = _ENVIRONMENT.get_template(template).render(**values)
    rendered = yaml.load(text, Loader=_Loader)  # a safe loader, the C one where libyaml is there  # noqa: S506
    if not isinstance(rendered, dict):
        raise TypeError(f"{template} must render one object, not {type(rendered).__name__}")
    return rendered
