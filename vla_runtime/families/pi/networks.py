"""Networks of this folder's families by name, and their fused form."""

from __future__ import annotations

from vla_runtime.families.pi.fused import FusedPi
from vla_runtime.families.pi.pi0 import Pi0
from vla_runtime.families.pi.pi05 import Pi05

NETWORKS = {'pi05': Pi05, 'pi0': Pi0}
FUSED = {'pi05': FusedPi, 'pi0': FusedPi}
