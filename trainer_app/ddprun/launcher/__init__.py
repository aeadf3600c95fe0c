"""The launcher of a node's ranks.

Starts contain each other: the operator starts an *attempt* of a job, with new pods; an attempt has *lives*, in each of
which the launchers start all ranks once; and a life that saves claims a *run*, a folder of checkpoints.
"""
