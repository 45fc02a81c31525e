"""What every Python of tests/run.sh imports first: to import verl or vLLM makes a million objects that stay.

Python's collector goes through them again and again, for a fifth of the time of such an import. A run of verl makes
ten.
"""

import gc

gc.set_threshold(50_000)
