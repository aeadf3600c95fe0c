"""Evaluates NetworkPolicies: may one pod connect to another? An implementation of its own, from the documentation.

https://kubernetes.io/docs/concepts/services-networking/network-policies/. It refuses IP blocks and named ports: no
policy of this project has them.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ddpjob.api.objects import Json


@dataclass(frozen=True)
class Place:
    """A pod, or with an empty namespace an address outside of the cluster's pods."""

    namespace: str
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)


OUTSIDE = Place("")


@dataclass(frozen=True)
class Network:
    """The policies of a cluster, and the labels of its namespaces besides the name that Kubernetes adds."""

    policies: tuple[Json, ...]
    namespaces: Mapping[str, Mapping[str, str]] = field(default_factory=dict, hash=False)

    def connects(self, source: Place, target: Place, port: int, protocol: str = "TCP") -> bool:
        """Return whether ``source`` may leave for the port, and ``target`` may be reached at it."""
        return self._allows("Egress", source, target, port, protocol) and self._allows(
            "Ingress", target, source, port, protocol
        )

    def _allows(self, direction: str, pod: Place, peer: Place, port: int, protocol: str) -> bool:
        """Return whether one direction of a pod's policies allows the connection. Policies add up."""
        chosen = [policy for policy in self._policies_of(pod) if direction in _types(policy["spec"])]
        return not chosen or any(
            self._is_peer(rule, direction, policy["metadata"]["namespace"], peer) and _has_port(rule, port, protocol)
            for policy in chosen
            for rule in policy["spec"].get(direction.lower()) or ()
        )

    def _policies_of(self, pod: Place) -> Iterator[Json]:
        for policy in self.policies:
            if policy["metadata"]["namespace"] == pod.namespace and matches(policy["spec"]["podSelector"], pod.labels):
                yield policy

    def _is_peer(self, rule: Json, direction: str, namespace: str, peer: Place) -> bool:
        peers = rule.get("from" if direction == "Ingress" else "to")
        return not peers or any(self._selects(selectors, namespace, peer) for selectors in peers)

    def _selects(self, selectors: Json, namespace: str, peer: Place) -> bool:
        """Return whether one peer of a rule selects the pod; its two selectors hold together."""
        assert selectors and selectors.keys() <= {"podSelector", "namespaceSelector"}, selectors
        if not peer.namespace:
            return False
        if "namespaceSelector" not in selectors:
            return peer.namespace == namespace and matches(selectors["podSelector"], peer.labels)
        own = {"kubernetes.io/metadata.name": peer.namespace}
        there = matches(selectors["namespaceSelector"], {**self.namespaces.get(peer.namespace, {}), **own})
        return there and matches(selectors.get("podSelector") or {}, peer.labels)


def matches(selector: Json, labels: Mapping[str, str]) -> bool:
    """Return whether a label selector of Kubernetes selects an object; an empty one selects every object."""
    assert selector.keys() <= {"matchLabels", "matchExpressions"}, selector
    given: Mapping[str, str] = selector.get("matchLabels") or {}
    return all(labels.get(key) == value for key, value in given.items()) and all(
        _holds(expression, labels) for expression in selector.get("matchExpressions") or ()
    )


def _holds(expression: Json, labels: Mapping[str, str]) -> bool:
    key, values = expression["key"], expression.get("values") or ()
    match expression["operator"]:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
    raise AssertionError(expression)


def _types(spec: Json) -> Iterable[str]:
    return spec.get("policyTypes") or ("Ingress", *(("Egress",) if spec.get("egress") else ()))


def _has_port(rule: Json, port: int, protocol: str) -> bool:
    ports: list[Any] = rule.get("ports") or []
    return not ports or any(
        entry.get("protocol", "TCP") == protocol
        and ("port" not in entry or entry["port"] <= port <= entry.get("endPort", entry["port"]))
        for entry in ports
    )
