"""Checks of this machine and of a cluster: ``ddpjob doctor``.

machine_reads, cluster_reads ─▶ probes (each with its time limit) ─▶ machine, cluster (pure verdicts) ─▶ check
"""
