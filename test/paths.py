"""Paths of the project's files."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
