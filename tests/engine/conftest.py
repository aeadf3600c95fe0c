"""Property tests run on shared machines: an example that takes long is no failure."""

from hypothesis import settings

settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")
