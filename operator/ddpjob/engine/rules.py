"""``restartPolicy.rules``: what the user wants instead of the table of ``failures``."""

from collections.abc import Sequence
from dataclasses import replace

from ddpjob.api.spec import RestartRule
from ddpjob.engine.failures import Judgement


def overrule(judgement: Judgement, rules: Sequence[RestartRule]) -> Judgement:
    """Return the judgement with the action of the first rule that matches it, or unchanged if none does.

    A rule does not change how pods are stopped: after a planned loss they still save a checkpoint.
    """
    for rule in rules:
        if _matches(rule, judgement):
            if rule.action == "Fail":
                return replace(judgement, action="Fail")
            counted = rule.action == "Restart"
            return replace(judgement, action="Restart", counted=counted, provisional=judgement.provisional and counted)
    return judgement


def _matches(rule: RestartRule, judgement: Judgement) -> bool:
    if rule.on_exit_codes is not None:
        code = judgement.evidence.exit_code if judgement.evidence else None
        if not code:
            return False  # no exit code, for example of a deleted pod, or 0 after SIGTERM
        return (code in rule.on_exit_codes.values) == (rule.on_exit_codes.operator == "In")
    return judgement.reason in (rule.on_reasons or ())
