"""Why a job is in its state: a pure function from what can be read of it to an ``Explanation``.

    explanation (Explanation) ◀─ facts (Case) ◀─ waiting, failed, running, operator ◀─ explain
                                                        └▶ autoscalers, images: the texts of other programs

What the operator has decided and written is used first. The engine's own functions judge what it has not written yet.
"""
