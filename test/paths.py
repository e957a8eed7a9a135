"""Paths of the project's files."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# From top to bottom: each imports those after it alone.
PACKAGES = ('vla_tabletop', 'vla_tools', 'vla_convert', 'vla_runtime')
