"""Puts the kit of these tests (``tuning_kit``) within reach of the test modules beside it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
