"""Network of this folder's family by name, and its fused form."""

from __future__ import annotations

from vla_runtime.families.smolvla.flow_policy import SmolVla
from vla_runtime.families.smolvla.fused import FusedSmolVla

NETWORKS = {'smolvla': SmolVla}
FUSED = {'smolvla': FusedSmolVla}
