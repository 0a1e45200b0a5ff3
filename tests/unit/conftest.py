from __future__ import annotations

from hypothesis import settings

# Seeds are fixed everywhere: what passes passes always. How long an example takes depends on the machine.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")
