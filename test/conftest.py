"""Shared by all tests: plain helper modules beside this file can be imported by name."""

import os
import sys
from pathlib import Path

from hypothesis import settings

# Tiny networks gain nothing from threads, and threads that spin on a busy machine lose tenfold.
os.environ.setdefault('OMP_NUM_THREADS', '1')

sys.path.insert(0, str(Path(__file__).parent))

# The same examples every time, and no verdict that depends on how busy the machine is.
settings.register_profile('vla_runtime', derandomize=True, deadline=None, max_examples=50)
settings.load_profile('vla_runtime')
