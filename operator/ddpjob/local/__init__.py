"""Local mode: runs a DDPJob on this machine, with the operator's own renderer, reconcile and status.

    session ─▶ MemoryCluster ◀─ operator (Reconciler)        ``session`` plays user and supervisor
                    ▲
                    └─ kubelet ─▶ pod ─▶ container ─▶ shim ─▶ the user's process

``translate`` and ``volumes`` turn what a pod expects of a cluster (names, ports, mounts) into what one machine has;
``state`` is what stays on disk, and what ``ddpjob get|logs|delete`` read from another shell.
"""
