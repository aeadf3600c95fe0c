"""``ddprun``: start and supervise the ranks of one node, for any program that trains with PyTorch. No Kubernetes.

The flow: ``launcher`` starts the ranks of a node, forwards their output, detects hangs and reports the root cause of a
failure. A ``Program`` says what a rank runs. In the rank, ``distributed`` has the rendezvous and the process group,
``heartbeat`` and ``self_watchdog`` make hangs visible, ``checkpoint_files`` stores checkpoints, and ``reporting`` has
progress, console output and the termination report. Torch is imported in the ranks, and by ``Program.preload``.
"""

from ddprun.script_interface import checkpoints, report, should_stop

__all__ = ["checkpoints", "report", "should_stop"]
__version__ = "0.1.0"
