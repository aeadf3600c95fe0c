"""``ddptrain``: a small trainer for MNIST with PyTorch's distributed data parallelism. It does not use Kubernetes.

The flow: ``cli`` starts a rank in this process, or the launcher of ``ddprun`` starts all ranks of a node. ``worker`` is
one rank, which ``ddprun.rank_run`` runs: it joins the group, loads the data (``data``) and trains (``training``).
"""

from ddprun import __version__ as __version__
