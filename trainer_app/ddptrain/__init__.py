"""``ddptrain``: small distributed data-parallel training of MNIST, made to be read and to be killed at any moment.

It knows nothing of Kubernetes: environment variables come in, files and one HTTP port go out.
The flow, one way: ``cli`` → (``launch`` forks the node's ranks) → ``worker`` (one rank's life) → ``group``, ``mnist``,
``train`` → ``checkpoint``, ``metrics``, ``progress`` → ``termination``.
"""

__version__ = "0.1.0"
