"""From what a container is told of a cluster to what one machine has: names of peers, ports, mount paths.

Pure, and applied once to every final value, so that nothing that was put in is translated again. Only what cannot be
otherwise here is changed; the pod object stays what the engine rendered.
"""

import re
from collections.abc import Callable, Iterable, Mapping

LOOPBACK = "127.0.0.1"
# Around a port that comes from a variable of the operator's: a bare 29500 may be anybody's number of steps.
_OPEN, _CLOSE = "\ue000", "\ue001"
_PATH_BEFORE = r"(?:(?<=file://)|(?<![\w./~)}\-*]))"
_PATH_AFTER = r"(?![\w.\-])"

PortOf = Callable[[str, int], int]
"""Where (pod, port) is found on this machine; the port itself where it is none of ours."""


def marked_port(port: str) -> str:
    """A port as a variable of the operator's gives it, recognisable wherever ``$(VAR)`` carries it."""
    return f"{_OPEN}{port}{_CLOSE}"


class Translator:
    """Translates the values of one pod's containers.

    pod, service: names of the pod and of the headless Service that its peers' names are under.
    port_of: see ``PortOf``. paths: mount path -> directory of this machine.
    """

    def __init__(
        self, *, pod: str, service: str, namespace: str, domain: str, port_of: PortOf, paths: Mapping[str, str]
    ) -> None:
        self._pod = pod
        self._port_of = port_of
        self._paths = {_normal(path): directory for path, directory in paths.items() if path.strip("/")}
        self._pattern = re.compile("|".join(_alternatives(service, namespace, domain, self._paths)))

    def text(self, value: str) -> str:
        """One value, or one word of a command."""
        return self._pattern.sub(self._replacement, value)

    def words(self, words: Iterable[str]) -> list[str]:
        """A command with its arguments."""
        out: list[str] = []
        before = ""
        for word in words:
            is_port = before in ("--master-port", "--master_port") and word.isdecimal()
            out.append(str(self._port_of(self._pod, int(word))) if is_port else self.text(word))
            before = word
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
    """Of the pattern, the most telling first."""
    scope = rf"{re.escape(service)}(?:\.{re.escape(namespace)}(?:\.svc(?:\.{re.escape(domain)}\.?)?)?)?"
    port = rf"(?::(?:(?P<peerport>\d+)|{_OPEN}(?P<peermarked>\d+){_CLOSE}))?"
    # A pod's name is <service>-<attempt>-<rank>; alone it is no name in the DNS, and an identity that must stay.
    yield rf"(?<![\w.\-])(?P<peer>{re.escape(service)}-\d+-\d+)\.{scope}(?![\w\-]|\.\w){port}"
    yield r"(?<![\w.\-])(?P<own>localhost|127\.0\.0\.1):(?P<ownport>\d+)(?!\d)"
    yield r"(?P<flag>--master[\-_]port[= ])(?P<flagport>\d+)(?!\d)"
    yield rf"{_OPEN}(?P<marked>\d+){_CLOSE}"
    longest_first = "|".join(re.escape(path) for path in sorted(paths, key=len, reverse=True))
    yield rf"{_PATH_BEFORE}(?P<path>{longest_first}){_PATH_AFTER}" if longest_first else "(?P<path>(?!))"


def _normal(path: str) -> str:
    return "/" + "/".join(part for part in path.split("/") if part not in ("", "."))
