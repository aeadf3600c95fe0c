"""The faults that the proxy injects at one write of an operator."""

from tests.worlds.fault_proxy import Fault

CRASHES = ("crash-before", "crash-after")
ANSWERS = ("dropped", "lost", "throttled", "error", "errors", "slow")
WATCHES = ("watch-cut", "watch-expired")
KINDS = CRASHES + ANSWERS + WATCHES
"""What happens at a write.

crash-before, crash-after: the operator is killed by SIGKILL before the request reaches the API server, or after it was
carried out and before the response. dropped: the connection ends, and the request is not carried out. lost: it is
carried out, and the connection ends without a response. throttled: 429 with Retry-After. error: 500. errors: 500, also
to the client's retries. slow: carried out after five seconds. watch-cut: the watches end. watch-expired: they end, and
when they are opened again the response is 410.
"""

ERRORS_IN_A_ROW = 6  # more than the client's retries of one request
EXPIRED = '{"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Expired","message":"injected"}}\n'
_INTERNAL = '{"kind":"Status","reason":"InternalError","message":"injected"}'

FAULTS = {
    "crash-before": Fault(),
    "crash-after": Fault(after_commit=True),
    "dropped": Fault(),
    "lost": Fault(after_commit=True),
    "throttled": Fault(status=429, headers={"Retry-After": "1"}),
    "error": Fault(status=500, body=_INTERNAL),
    "errors": Fault(status=500, body=_INTERNAL),
    "slow": Fault(hold=5.0, forward=True),
    "watch-cut": Fault(forward=True),
    "watch-expired": Fault(forward=True),
}
