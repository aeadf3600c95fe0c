"""The token of an attempt: what only its pods have in common, so that the launchers in them recognise each other.

A process draws it from a key of its own, so that it need not be stored: the status has its digest. The next process,
with another key, reads it from the pods that exist.
"""

import hashlib
import hmac

from ddpjob.api.times import seconds_since
from ddpjob.engine.state import JobState

RIVAL_SECONDS = 5
"""For so long an attempt without pods is left to the process that began it, which may still run."""


def attempt_token(s: JobState, number: int) -> str | None:
    """Return the token for the pods that an attempt lacks; "" for none, None if it is not known."""
    key, tokens = s.observed.token_key, {pod.token for pod in s.pods if pod.attempt == number}
    own = hmac.new(key, f"{s.job.uid}/{number}".encode(), "sha256").hexdigest() if key else ""
    recorded = s.attempt.token_hash if number == s.attempt.number else None
    if not tokens:
        is_ours = recorded in (None, token_hash(own)) or not key
        return own if is_ours or seconds_to_wait(s) <= 0 else None
    token = tokens.pop()
    # Nothing is recorded by an operator that draws no tokens, or by a CRD without the field. A webhook may have
    # removed the token from all pods.
    if recorded in (None, token_hash(token)) or not key:
        return None if tokens else token
    return own if not tokens and not token and recorded == token_hash(own) else None


def token_is_lost(s: JobState) -> bool:
    """Return whether the pods of the recorded attempt have different tokens, or would after the next creates."""
    is_whole = not s.missing_nodes and len({pod.token for pod in s.current.values()}) < 2
    return bool(s.current) and not is_whole and attempt_token(s, s.attempt.number) is None


def seconds_to_wait(s: JobState) -> float:
    """Return for how long another process may still create the first pods of the attempt."""
    return RIVAL_SECONDS - abs(seconds_since(s.attempt.start_time, s.now))  # in the future after a clock was set back


def token_hash(token: str | None) -> str | None:
    """Return what the status shows of a token."""
    return hashlib.sha256(token.encode()).hexdigest() if token else None
