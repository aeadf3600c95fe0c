"""Fill the YAML templates in ``templates/``; no value can change their structure.

A template is rendered with a placeholder instead of each value. The resulting YAML, its *skeleton*, depends only on
which ``{% if %}`` and ``{% for %}`` blocks are used, so it is parsed once and kept. Then the placeholders are replaced
by the values in the parsed object: no value is ever written as YAML, and reading YAML, which takes a hundred times as
long as the rest, happens once per skeleton. Undefined names are errors.
"""

import re
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from ddpjob.api.objects import Json

if TYPE_CHECKING:
    from jinja2 import Environment
    from jinja2.runtime import Context

_MARK = "\ue000"  # a private-use character, which no template contains
_PLACEHOLDER = re.compile(f"{_MARK}([0-9]+){_MARK}")
_VALUES = "_values"
_SKELETONS = 128  # far more than a cluster's jobs use: each combination of optional blocks is one


@cache
def _environment() -> "Environment":
    """Return the environment of all templates. Commands that render none do not import Jinja."""
    from jinja2 import Environment, PackageLoader, StrictUndefined, pass_context

    @pass_context
    def placeholder(context: "Context", value: Any) -> str:
        """Return the placeholder of the value of one ``{{ }}``, and append the value to the list of values."""
        if isinstance(value, StrictUndefined):
            return str(value)  # raises UndefinedError, which names the variable
        values: list[Any] = context[_VALUES]
        values.append(value)
        return f'"{_MARK}{len(values) - 1}{_MARK}"'

    return Environment(
        loader=PackageLoader("ddpjob.engine"),
        undefined=StrictUndefined,
        finalize=placeholder,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
        autoescape=False,  # the output is YAML, not HTML, and contains no value  # noqa: S701
    )


def render(template: str, **values: Any) -> Json:
    """Return the object that ``templates/<template>`` describes, with ``values`` in it (not copies of them).

    Raises:
        jinja2.UndefinedError: the template uses a value that was not given (a bug).
        TypeError: the template is no object, or a ``{{ }}`` is only a part of a string (a bug).
    """
    used: list[Any] = []
    skeleton = _parse(_environment().get_template(template).render(values | {_VALUES: used}))
    if not isinstance(skeleton, dict):
        raise TypeError(f"{template} must render one object, not {type(skeleton).__name__}")
    filled: Json = _fill(skeleton, used)
    return filled


@lru_cache(_SKELETONS)
def _parse(skeleton: str) -> Any:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(skeleton, Loader=loader)  # a safe loader, the C one where libyaml is there  # noqa: S506


def _fill(part: Any, values: list[Any]) -> Any:
    if isinstance(part, dict):
        return {_fill(key, values): _fill(item, values) for key, item in part.items()}
    if isinstance(part, list):
        return [_fill(item, values) for item in part]
    if not isinstance(part, str) or _MARK not in part:
        return part
    if placeholder := _PLACEHOLDER.fullmatch(part):
        return values[int(placeholder[1])]
    raise TypeError(f"a value must be a whole key or value of the YAML, not a part of one: {part!r}")
