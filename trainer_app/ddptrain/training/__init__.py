"""The training loop and its parts: models, optimizer, gradient synchronization, evaluation, checkpointing."""
