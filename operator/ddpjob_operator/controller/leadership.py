"""Of several replicas one works: the holder of a Lease (coordination.k8s.io/v1). The others are on standby.

Two that work at the same time are safe, because every status patch is conditional and every pod has a name of its own.
The Lease only avoids the double work, so nothing is fenced with it, and no clock is compared with that of another node:
a standby measures with its own clock for how long the Lease has not changed.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob_operator.cluster.base import AlreadyExists, Cluster, ClusterError, Conflict, NotFound

logger = logging.getLogger(__name__)

LEASE_SECONDS = 9
"""A Lease that has not changed for this time is free. With polls and first LISTs, a standby works after 12 s."""
MAX_LEASE_SECONDS = 60
"""The longest duration that a Lease may claim: one of another program with an hour kept all replicas on standby."""
RENEW_SECONDS = 2.0
POLL_SECONDS = 1.0
TRY_SECONDS = 3.0
"""Time limit of one try: several must fit into ``LEASE_SECONDS``."""


class LeadershipLostError(Exception):
    """Another replica holds the Lease."""


@dataclass
class Leadership:
    """The Lease ``namespace``/``name``, for the replica ``identity``.

    now: the time that is written into the Lease, for people. clock: monotonic seconds.
    ``holder``: the replica that held the Lease when it was last read.
    """

    cluster: Cluster
    namespace: str
    name: str
    identity: str
    now: Callable[[], datetime]
    clock: Callable[[], float] = time.monotonic
    holder: str = field(default="", init=False)
    _version: str = field(default="", init=False)
    _unchanged_since: float = field(default=0.0, init=False)

    @property
    def is_leader(self) -> bool:
        return self.holder == self.identity

    def standby(self) -> tuple[bool, str]:
        """Return whether another replica works, as far as this one on standby knows, and the reason."""
        silent = self.clock() - self._unchanged_since
        if not self.holder or silent <= 2 * LEASE_SECONDS:
            return bool(self.holder), f"standby: {self.holder or 'no replica'} holds the Lease"
        return False, f"standby: {self.holder} holds the Lease, and has not renewed it for {silent:.0f} s"

    async def acquire(self, stop: asyncio.Event) -> bool:
        """Wait until this replica holds the Lease, or ``stop`` is set; return whether it holds the Lease.

        A Lease with its own identity is that of an earlier process.
        """
        announced = ""
        while not await self._try(self._take_if_free):
            if self.holder != announced:
                announced = self.holder
                logger.info("on standby: %s holds the Lease %s/%s", announced, self.namespace, self.name)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), POLL_SECONDS)
                return False
        logger.info("this replica holds the Lease %s/%s", self.namespace, self.name)
        return True

    async def keep(self) -> None:
        """Renew the Lease until cancelled. Raises ``LeadershipLostError``."""
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            if await self._try(self._take_if_free) is False and not self.is_leader:
                raise LeadershipLostError(
                    f"{self.holder or 'another replica'} holds the Lease {self.namespace}/{self.name}"
                )

    async def release(self) -> None:
        """Give the Lease back, so that a standby takes it at once."""

        async def give_back() -> bool:
            await self._read()
            return self.is_leader and await self._write({"holderIdentity": ""})

        await self._try(give_back)

    async def _try(self, act: Callable[[], Awaitable[bool]]) -> bool | None:
        """Return the result; None if it is not known, because the API server gave no usable response in time."""
        try:
            async with asyncio.timeout(TRY_SECONDS):
                return await act()
        except (ClusterError, TimeoutError) as error:
            logger.warning("the Lease %s/%s: %s: %s", self.namespace, self.name, type(error).__name__, error)
            return None

    async def _take_if_free(self) -> bool:
        """Take or renew the Lease unless another replica holds it; return whether it is held."""
        lease = await self._read()
        if lease is None:
            return await self._create()
        spec = lease.get("spec") or {}
        limit = min(float(spec.get("leaseDurationSeconds") or LEASE_SECONDS), MAX_LEASE_SECONDS)
        is_expired = self.clock() - self._unchanged_since > limit
        if self.holder not in ("", self.identity) and not is_expired:
            return False
        transitions = int(spec.get("leaseTransitions") or 0)
        taken = {} if self.is_leader else {"acquireTime": self._time(), "leaseTransitions": transitions + 1}
        return await self._write(self._held() | taken)

    async def _read(self) -> Json | None:
        try:
            lease = await self.cluster.get(names.LEASES, self.namespace, self.name)
        except NotFound:
            self.holder = ""
            return None
        self._note(lease)
        return lease

    async def _create(self) -> bool:
        body = {"apiVersion": names.LEASES.api_version, "kind": names.LEASES.kind, "metadata": {"name": self.name}}
        spec = self._held() | {"acquireTime": self._time(), "leaseTransitions": 0}
        try:
            self._note(await self.cluster.create(names.LEASES, self.namespace, body | {"spec": spec}))
        except AlreadyExists:
            return False
        return True

    async def _write(self, spec: Json) -> bool:
        """Change the Lease unless it has changed since it was read."""
        body = {"metadata": {"resourceVersion": self._version}, "spec": spec}
        try:
            self._note(await self.cluster.patch(names.LEASES, self.namespace, self.name, body))
        except (Conflict, NotFound):
            return False
        return True

    def _note(self, lease: Json) -> None:
        self.holder = str((lease.get("spec") or {}).get("holderIdentity") or "")
        version = lease["metadata"]["resourceVersion"]
        if version != self._version:
            self._version, self._unchanged_since = version, self.clock()

    def _held(self) -> dict[str, Any]:
        return {"holderIdentity": self.identity, "leaseDurationSeconds": LEASE_SECONDS, "renewTime": self._time()}

    def _time(self) -> str:
        return self.now().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
