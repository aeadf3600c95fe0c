"""The verbs that use a trained model: ``eval``, ``infer``, ``predict`` and ``export``. They only read checkpoints."""
