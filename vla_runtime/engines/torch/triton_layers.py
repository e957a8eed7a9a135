"""An engine's head with its layers in Triton kernels, instead of the fused ones."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from vla_runtime.engines.torch.compilation import Key, Part
from vla_runtime.engines.torch.compiler import Run
from vla_runtime.families.blocks.layer_comparison import ComparedExpert, LayerError, worst_fault

if TYPE_CHECKING:
    from vla_runtime.engines.torch.engine import TorchEngine

FORM = 'in Triton kernels'


class HeadLayers:
    """Layout of an engine's tensors over a prefix: `FusedExpert` or the layers that are put here.

    Keeps both while they are compared, each with what was laid out for it, so that going from one
    to the other lays nothing out. As `compilation.Runs`; the keys do not matter.

    Args:
        engine: engine that has laid out nothing but its trial inputs.
    """

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._fused = type(engine._fused).expert_type
        self._laid_out: dict[Any, dict[Any, Any]] = {self._fused: engine._laid_out}

    def __setitem__(self, key: Key, run: Run, /) -> None:
        self._use(run)
        # The first time, and when the trial wrote other inputs.
        for (rows, slot), _ in self._laid_out[self._fused]:
            self._engine.use_prefix(rows, slot)
            self._engine._lay_out()

    def __delitem__(self, key: Key, /) -> None:
        self._use(self._fused)

    def compare_layers(self, part: Part, run: Any) -> str:
        """Run a part with each layer in both forms and in float32.

        Returns:
            the worst layer whose Triton kernels are further from float32 than rounding explains, in
            words; else ''
        """
        errors: list[LayerError] = []
        compared: Run = partial(ComparedExpert, run, errors)
        self[part.key] = compared
        try:
            part.work()
        finally:
            del self[part.key]
            del self._laid_out[compared]
        return worst_fault(errors)

    def _use(self, expert_type: Any) -> None:
        self._engine._fused.expert_type = expert_type
        self._engine._laid_out = self._laid_out.setdefault(expert_type, {})


def triton_layers(network: str, call: Run) -> Run:
    """Return the class that takes the place of `FusedExpert`; the arguments do not matter.

    Raises:
        ImportError: no Triton, or one that does not work here.
    """
    from vla_runtime.families.blocks.triton_expert import TritonExpert

    return TritonExpert
