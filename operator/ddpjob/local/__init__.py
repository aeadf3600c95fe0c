"""Local mode: runs a DDPJob on this machine with the operator's own renderer, reconciler and status.

    admission ─▶ session ─▶ MemoryCluster ◀─ controller
                    ▲
                    └─ kubelet ─▶ container ─▶ shim ─▶ the user's process

``translate``, ``volumes`` and ``resources`` replace the names, mounts and ports of a cluster by those of this machine.
``state`` holds the files that ``ddpjob get``, ``logs`` and ``delete`` read from another shell.
"""
