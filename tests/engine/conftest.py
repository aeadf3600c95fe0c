"""Settings of property tests: no deadline, because a slow example on a shared machine is no failure.

With CI=true every run draws the same examples: a change is judged by what it changed. Without, each run looks further.
"""

import os

from hypothesis import settings

settings.register_profile("shared-machine", deadline=None, derandomize=os.environ.get("CI") == "true")
settings.load_profile("shared-machine")
