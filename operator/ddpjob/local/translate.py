"""Translates peers' names, ports and mount paths of a cluster into those of this machine. Pure.

Every value is translated once, in its final form, so that replacements are not translated again. The pod object stays
as the engine rendered it.
"""

import re
from collections.abc import Callable, Iterable, Mapping

LOOPBACK = "127.0.0.1"
# Enclose a port from one of the operator's variables: a plain 29500 could be, say, a number of steps.
_OPEN, _CLOSE = "\ue000", "\ue001"
_PATH_BEFORE = r"(?:(?<=file://)|(?<![\w./~)}\-*]))"
_PATH_AFTER = r"(?![\w.\-])"

PortOf = Callable[[str, int], int]
"""Returns the local port for (pod, port); other ports are returned unchanged."""


def marked_port(port: str) -> str:
    """Return a port marked as one of the operator's, so that it is recognised where ``$(VAR)`` inserts it."""
    return f"{_OPEN}{port}{_CLOSE}"


class Translator:
    """Translates the values of one pod's containers.

    pod, service: names of the pod and of its headless Service, which is the subdomain of the peers.
    port_of: see ``PortOf``. paths: mount path to directory of this machine.
    """

    def __init__(
        self, *, pod: str, service: str, namespace: str, domain: str, port_of: PortOf, paths: Mapping[str, str]
    ) -> None:
        self._pod = pod
        self._port_of = port_of
        self._paths = {_normal(path): directory for path, directory in paths.items() if path.strip("/")}
        self._pattern = re.compile("|".join(_alternatives(service, namespace, domain, self._paths)))

    def text(self, value: str) -> str:
        """Return one value, translated."""
        return self._pattern.sub(self._replacement, value)

    def command(self, arguments: Iterable[str]) -> list[str]:
        """Return a command with its arguments, translated."""
        out: list[str] = []
        before = ""
        for argument in arguments:
            is_port = before in ("--master-port", "--master_port") and argument.isdecimal()
            out.append(str(self._port_of(self._pod, int(argument))) if is_port else self.text(argument))
            before = argument
        return out

    def _replacement(self, found: re.Match[str]) -> str:
        if found["path"]:
            return self._paths[found["path"]]
        if found["marked"]:
            return str(self._port_of(self._pod, int(found["marked"])))
        if found["flag"]:
            return f"{found['flag']}{self._port_of(self._pod, int(found['flagport']))}"
        if found["own"]:
            return f"{found['own']}:{self._port_of(self._pod, int(found['ownport']))}"
        port = found["peerport"] or found["peermarked"]
        return LOOPBACK if not port else f"{LOOPBACK}:{self._port_of(found['peer'], int(port))}"


def _alternatives(service: str, namespace: str, domain: str, paths: Iterable[str]) -> Iterable[str]:
    """Yield the alternatives of the pattern, the most specific first."""
    scope = rf"{re.escape(service)}(?:\.{re.escape(namespace)}(?:\.svc(?:\.{re.escape(domain)}\.?)?)?)?"
    port = rf"(?::(?:(?P<peerport>\d+)|{_OPEN}(?P<peermarked>\d+){_CLOSE}))?"
    # <service>-<attempt>-<rank> alone is the pod's identity, not a DNS name, and is not translated.
    yield rf"(?<![\w.\-])(?P<peer>{re.escape(service)}-\d+-\d+)\.{scope}(?![\w\-]|\.\w){port}"
    yield r"(?<![\w.\-])(?P<own>localhost|127\.0\.0\.1):(?P<ownport>\d+)(?!\d)"
    yield r"(?P<flag>--master[\-_]port[= ])(?P<flagport>\d+)(?!\d)"
    yield rf"{_OPEN}(?P<marked>\d+){_CLOSE}"
    longest_first = "|".join(re.escape(path) for path in sorted(paths, key=len, reverse=True))
    yield rf"{_PATH_BEFORE}(?P<path>{longest_first}){_PATH_AFTER}" if longest_first else "(?P<path>(?!))"


def _normal(path: str) -> str:
    return "/" + "/".join(part for part in path.split("/") if part not in ("", "."))
