"""Networks of GR00T, by family."""

from vla_runtime.families.groot.n15 import GrootN15
from vla_runtime.families.groot.n16 import GrootN16
from vla_runtime.families.groot.n17 import GrootN17

NETWORKS = {'groot_n15': GrootN15, 'groot_n16': GrootN16, 'groot_n17': GrootN17}
