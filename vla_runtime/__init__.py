"""Carry a vision-language-action policy from a checkpoint to a moving robot."""

__version__ = '0.1.0'
