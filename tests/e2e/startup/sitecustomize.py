"""First on the path of every Python of a run: an import of verl or vLLM makes a million objects that stay.

Python's collector goes through them again and again, for a fifth of the time that the ten processes of a run take to
import.
"""

import gc

gc.set_threshold(50_000)
