"""Restarts in place: how many an attempt may have, and what its launchers have reported of them.

A *life* is one start of all processes of an attempt, in the pods that run already. The launchers agree on the next life
themselves, within the number that the operator has granted with the attempt, so they need neither rights nor a running
operator. When they end the attempt instead, the table of failures applies as to any other attempt.
"""

from ddpjob.api.report import EndReport, TrainingReport
from ddpjob.api.restarts import RestartPolicy
from ddpjob.api.status import InPlace, LifeFailure

KEPT_LIVES = 5


def grant(before: InPlace | None, restarts: int, policy: RestartPolicy) -> int:
    """Return how many restarts in place the next attempt may have: what is left of maxTotalRestarts.

    0 if a failure must end the job, by maxRestarts 0 or a rule, because the launchers do not know the user's rules.
    Without progress in the attempt before, a restart in place does not help: then new pods are tried without.

    Args:
        before: of the attempt before. restarts: towards maxTotalRestarts until now.
    """
    may_fail = policy.max_restarts == 0 or any(rule.action == "Fail" for rule in policy.restart_rules or ())
    failures = (before.failures if before else None) or ()
    is_fruitless = spent(before) > 0 and not any(failure.progressed for failure in failures)
    return 0 if may_fail or is_fruitless else max(policy.max_total_restarts - restarts, 0)


def spent(in_place: InPlace | None) -> int:
    """Return how many restarts in place an attempt has had."""
    return max((in_place.life or 1) - 1, 0) if in_place else 0


def fold(in_place: InPlace, report: TrainingReport | EndReport) -> InPlace:
    """Return what is known with a report. An older one, or the same again, changes nothing: reports may be reordered.

    Any program may report any number, so a life beyond the grant is not counted.
    """
    life = min(max(report.life or 1, in_place.life or 1), in_place.granted + 1)
    known = {failure.life: failure for failure in in_place.failures or ()}
    for one in report.lives or ():
        if one.life is None or one.life > life:
            continue
        if one.life in known:
            if known[one.life].recovery_milliseconds is None:
                known[one.life] = known[one.life].changed(recovery_milliseconds=one.recovery_milliseconds)
        else:
            known[one.life] = LifeFailure(
                life=one.life,
                node_rank=one.node,
                rank=one.rank,
                reason=one.kind or "Failed",
                message=one.message or "",
                progressed=one.progressed is not False,
                recovery_milliseconds=one.recovery_milliseconds,
            )
    failures = [known[number] for number in sorted(known)][-KEPT_LIVES:]
    if life == (in_place.life or 1) and failures == list(in_place.failures or ()):
        return in_place
    return in_place.changed(life=life, failures=failures or None)
