"""Two processes run the tests (``-n`` in pyproject.toml); each, and what it starts, computes on one thread."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
