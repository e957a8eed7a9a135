"""GR00T N1.5, N1.6 and N1.7 (arXiv 2503.14734)."""

from vla_runtime.models.groot.networks import NETWORKS

__all__ = ['NETWORKS']
