"""The DDPJob operator: runs one PyTorch training with one pod per node and restarts all pods together on a failure."""

__version__ = "0.1.0"
