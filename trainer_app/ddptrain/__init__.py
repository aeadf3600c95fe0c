"""``ddptrain``: small distributed data-parallel training of MNIST, made to be read and to be killed at any moment.

It knows nothing of Kubernetes: environment variables come in, files and one HTTP port go out.
The flow, one way: ``cli`` → (``launch``: ``children`` starts the node's ranks, ``supervise`` and ``watchdog`` watch
them) → ``entry`` → ``worker`` (one rank's life, ``guard`` at its side) → ``group``, ``mnist``, ``train`` → ``recorder``
(``checkpoint_writer``; ``journal``: ``metrics``) and ``telling`` (``console``, ``progress``) → ``termination``,
``postmortem``.
"""

__version__ = "0.1.0"
