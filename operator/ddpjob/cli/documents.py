"""YAML as Kubernetes reads it: strict about duplicate keys, without dates, with text for keys."""

from collections.abc import Hashable
from typing import Any

import yaml


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader without what Kubernetes' own reader does otherwise."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - so it is declared there
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Refuse a key that stands twice: one of the two would be lost without a word."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = str(key_node.value)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f'"{key}" stands twice', problem_mark=key_node.start_mark)
            seen.add(key)
        mapping = super().construct_mapping(node, deep)
        return {_key(key): value for key, value in mapping.items()}


class Dumper(yaml.SafeDumper):
    """Writes repeated parts out in full: not every reader of a manifest understands YAML's anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def dump(*objects: Any) -> str:
    """Documents of one stream, escapes for whatever is not ASCII included."""
    return yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, width=120)


def problem(error: yaml.YAMLError) -> str:
    """What is wrong, and where, in one line."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    mark = error.problem_mark
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return place + (error.problem or error.context or "")


def _key(key: Hashable) -> Hashable:
    return str(key).lower() if isinstance(key, bool) else str(key) if isinstance(key, int | float) else key
