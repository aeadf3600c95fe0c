"""``ddptrain``: a small trainer for MNIST with PyTorch's distributed data parallelism. It does not use Kubernetes.

The flow: ``cli`` starts a rank in this process, or ``launcher`` starts and supervises all ranks of a node. ``worker``
runs one rank: it joins the group (``distributed``), loads the data (``data``) and trains (``training``).
``reporting`` writes metrics, progress, console output and the termination report.
"""

from ddprun import __version__ as __version__
