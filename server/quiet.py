"""Silences SGLang's Python warnings in the process that imports this, which must be before SGLang.

It warns about each kernel family that a machine does not have, in each of its processes, and about a class
that FastAPI deprecates, on each refused request: nothing that who runs the server can act on.
"""

import warnings

warnings.filterwarnings("ignore", module=r"sglang\.")
