"""Dimensions of shared blocks. Pure numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VisionDims:
    """A SigLIP vision transformer (arXiv 2303.15343)."""

    width: int
    depth: int
    num_heads: int
    mlp_dim: int
    patch_size: int
    image_size: int

    @property
    def tokens(self) -> int:
        """Tokens of one image."""
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True)
class GemmaDims:
    """A Gemma decoder stack (arXiv 2403.08295)."""

    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
