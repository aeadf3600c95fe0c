"""Probable mistakes of a spec that the API accepts: events of the operator, warnings of ``validate`` and ``run``."""

from collections.abc import Iterator
from typing import NamedTuple

from ddpjob.engine.desired import Job, overridden_fields
from ddpjob.engine.launcher import injection_warning, launch_warning


class Mistake(NamedTuple):
    """What is probably wrong. reason: of the event. field: of the spec."""

    reason: str
    field: str
    message: str


def mistakes(job: Job) -> Iterator[Mistake]:
    """Yield each probable mistake of a job's spec."""
    if warning := launch_warning(job):
        yield Mistake("NoLauncher", "command", warning)
    if warning := injection_warning(job):
        yield Mistake("LauncherNotUsed", "command", warning)
    if fields := overridden_fields(job):
        text = f"the operator sets these fields itself, and ignores the values in {', '.join(fields)}"
        yield Mistake("TemplateOverridden", "template", text)
    if job.spec.network_policy is not None and job.template_spec.get("hostNetwork"):
        text = "spec.networkPolicy has no effect: network plugins apply it to no pod with hostNetwork"
        yield Mistake("NetworkPolicyIgnored", "networkPolicy", text)
