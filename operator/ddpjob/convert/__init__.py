"""Jobs of Kubeflow as DDPJobs: JSON in, JSON and notes out; pure.

    conversion ─▶ pytorchjob, trainjob ─▶ pods ─▶ torchrun ─▶ fields

What a DDPJob cannot say is not lost in silence: each such field becomes a ``Difference``.
"""

KINDS = ("PyTorchJob", "TrainJob")
"""The kinds of which a DDPJob can be made."""
