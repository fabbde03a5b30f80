"""One pytest suite over every lesson: what to test is read off the lessons."""

import os

# Each worker has one core's worth of work; torch's own threads would only fight over it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
