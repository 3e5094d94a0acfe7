"""Property tests draw the same examples in every run: a red one stays red until it is mended.

``HYPOTHESIS_PROFILE=explore`` draws new ones.
"""

import os

from hypothesis import settings

settings.register_profile("repeat", derandomize=True, deadline=None, database=None)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))
