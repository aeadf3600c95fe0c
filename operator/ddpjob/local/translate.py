"""Translates peers' names and mount paths of a cluster into those of this machine. Pure.

Every value is translated once, in its final form, so that replacements are not translated again. The pod object stays
as the engine rendered it.
"""

import re
from collections.abc import Mapping
from pathlib import PurePosixPath

LOOPBACK = "127.0.0.1"
_PATH_BEFORE = r"(?:(?<=file://)|(?<![\w./~)}\-*]))"
_PATH_AFTER = r"(?![\w.\-])"


class Translator:
    """Translates the values of a pod's trainer.

    service: name of the pod's headless Service, which is the subdomain of the peers. paths: mount path to directory of
    this machine.
    """

    def __init__(self, *, service: str, namespace: str, domain: str, paths: Mapping[str, str]) -> None:
        self._paths = {
            str(PurePosixPath("/" + path.strip("/"))): directory for path, directory in paths.items() if path.strip("/")
        }
        scope = rf"{re.escape(service)}(?:\.{re.escape(namespace)}(?:\.svc(?:\.{re.escape(domain)}\.?)?)?)?"
        longest_first = "|".join(re.escape(path) for path in sorted(self._paths, key=len, reverse=True))
        self._pattern = re.compile(
            # <service>-<attempt>-<rank> alone is the pod's identity, not a DNS name, and is not translated.
            rf"(?<![\w.\-]){re.escape(service)}-\d+-\d+\.{scope}(?![\w\-]|\.\w)"
            + (rf"|{_PATH_BEFORE}(?P<path>{longest_first}){_PATH_AFTER}" if longest_first else "(?P<path>(?!))?")
        )

    def text(self, value: str) -> str:
        """Return one value, translated."""
        return self._pattern.sub(lambda found: self._paths[found["path"]] if found["path"] else LOOPBACK, value)
