"""The version of the operator, its command line and its Python API; ``ddpjob.__version__``."""

__version__ = "0.1.0"
