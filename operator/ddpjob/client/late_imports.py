"""Imports the official ``kubernetes`` package without what this client does not use of it.

The package imports all its clients, also those for streams and for typed watches, and two libraries of OAuth, which
refresh tokens of OpenID Connect. These are two thirds of its time, 0.1 s in each command that asks a cluster.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from types import ModuleType
from typing import Any

_LATE = frozenset(
    {
        "kubernetes.dynamic",
        "kubernetes.informer",
        "kubernetes.leaderelection",
        "kubernetes.stream",
        "kubernetes.watch",
        "oauthlib.oauth2",
    }
)
"""Modules whose code runs when one of their attributes is read for the first time."""
_OAUTH = "requests_oauthlib"


@contextmanager
def late_imports() -> Iterator[None]:
    """Let what the block imports of the official package import less. What is imported already stays as it is."""
    finder, session = _LateFinder(), ModuleType(_OAUTH)
    session.OAuth2Session = _oauth2_session  # type: ignore[attr-defined]
    sys.meta_path.insert(0, finder)
    is_absent = sys.modules.setdefault(_OAUTH, session) is session
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        if is_absent:
            del sys.modules[_OAUTH]


class _LateFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in _LATE else None
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


def _oauth2_session(*arguments: Any, **options: Any) -> Any:
    """Return the session that the official package asks for: it imports the name, which a lazy module cannot delay."""
    from requests_oauthlib import OAuth2Session  # type: ignore[import-untyped]

    return OAuth2Session(*arguments, **options)
