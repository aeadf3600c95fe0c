"""The DDPJob operator: one pod per node, one training, restarted as a group until it ends."""

__version__ = "0.1.0"
