"""The Python API: one interface for jobs on this machine and on a cluster (docs/tasks/python.md).

    base (Client, LogLine) ◀─ local, local_logs        the state folder, and processes in the background
                           ◀─ cluster, cluster_logs    the official ``kubernetes`` package
    job (DDPJob) ─▶ jobspec, jobfile
    validation                                          files, for the command line

``Client.local`` and ``Client.cluster`` import their module late: a local job needs no ``kubernetes``, and the command
line answers at once.
"""
