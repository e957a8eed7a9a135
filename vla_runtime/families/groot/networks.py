"""Networks of GR00T, by family; that of N1.6 has Eagle's features, and N1.7's action head."""

from __future__ import annotations

from vla_runtime.families.groot.alternation import AlternatingHead
from vla_runtime.families.groot.eagle import EagleFeatures
from vla_runtime.families.groot.n15 import GrootN15
from vla_runtime.families.groot.n16_dimensions import GrootN16Dims
from vla_runtime.families.groot.n17 import GrootN17
from vla_runtime.families.groot.qwen3 import Qwen3
from vla_runtime.families.groot.siglip2 import EagleVision2


class GrootN16(EagleFeatures, AlternatingHead):
    """Vision encoder, language model and head."""

    dims: GrootN16Dims
    vision: EagleVision2

    def __init__(self, dims: GrootN16Dims) -> None:
        super().__init__(dims)
        self.vision = EagleVision2(dims)
        self.language = Qwen3(dims.language, dims.rms_epsilon, dims.vocabulary)
        self.build_head()


NETWORKS = {'groot_n15': GrootN15, 'groot_n16': GrootN16, 'groot_n17': GrootN17}
