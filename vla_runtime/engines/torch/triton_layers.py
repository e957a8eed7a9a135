"""An engine's head with its layers in Triton kernels, instead of the fused ones."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from vla_runtime.engines.torch.layer_choice import Part
from vla_runtime.families.blocks.layer_comparison import ComparedExpert, LayerError, worst_fault

if TYPE_CHECKING:
    from vla_runtime.engines.torch.engine import TorchEngine


def compare_layers(engine: TorchEngine, part: Part, form: Any) -> str:
    """Run a part with each layer in both forms and in float32.

    Args:
        engine: engine that has laid out nothing but its trial inputs.
        part: a shape of the denoise step.
        form: class of the layers in Triton kernels.

    Returns:
        the worst layer whose Triton kernels are further from float32 than rounding explains, in
        words; else ''
    """
    errors: list[LayerError] = []
    prepared = engine._prepared
    engine._layers[part.shape], engine._prepared = partial(ComparedExpert, form, errors), {}
    try:
        part.work()
    finally:
        del engine._layers[part.shape]
        engine._prepared = prepared
    return worst_fault(errors)


def triton_layers() -> Any:
    """Return the class that takes the place of `FusedExpert`.

    Raises:
        ImportError: no Triton, or one that does not work here.
    """
    from vla_runtime.families.blocks.triton_expert import TritonExpert

    return TritonExpert
