"""Errors of an expert's layers in another form, each layer by itself.

A whole network in bfloat16 is 1 to 8% off, a single layer by its rounding alone. So each layer runs
three times on the same input: in float32, in `JoinedExpert`'s operators, and in the other form; a
right form is about as far from float32 as the operators are. What lies around the layers is
float32 itself, and is compared with float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.models.blocks.epilogues import EXACT, MEAN_RATIO, WORST_RATIO
from vla_runtime.models.blocks.expert import BlockProducts, JoinedExpert, Past
from vla_runtime.models.blocks.flow_update import advance
from vla_runtime.models.blocks.key_lengths import Kernel
from vla_runtime.models.blocks.layers import Modulation, apply


@dataclass(frozen=True)
class LayerError:
    """Distance of a layer's result from the exact one, in units of the largest contribution.

    `mean` is the root mean square and `worst` the largest error of the other form, NaN where a
    number is; the other two are the operators'.
    """

    name: str
    mean: float
    worst: float
    operators_mean: float
    operators_worst: float

    @property
    def fits(self) -> bool:
        """True where the other form is about as near to the exact result as the operators."""
        return (
            self.mean <= MEAN_RATIO * self.operators_mean + EXACT
            and self.worst <= WORST_RATIO * self.operators_worst + EXACT
        )

    def describe(self) -> str:
        return (
            f'{self.name} is {self.mean:.1e} off on average and {self.worst:.1e} at most, its '
            f'operators {self.operators_mean:.1e} and {self.operators_worst:.1e}'
        )


class ComparedExpert(JoinedExpert):
    """`JoinedExpert` that also runs each layer in another form and in float32.

    `form` is the class of the other form; `errors` takes the error of each layer of each call.
    """

    def __init__(
        self,
        form: type[JoinedExpert],
        errors: list[LayerError],
        blocks: Sequence[BlockProducts],
        suffix_sees: Tensor,
        kernel: Kernel | None = None,
        static_shapes: bool = False,
    ) -> None:
        super().__init__(blocks, suffix_sees, kernel, static_shapes)
        self._form, self._errors = form, errors

    def load(self, mask: Tensor, self_past: Past | None, cross_past: Past | None = None) -> None:
        """Keep the prefix for `__call__`."""
        self._prefix = mask, self_past, cross_past

    def __call__(self, h: Tensor, modulations: Sequence[Modulation]) -> Tensor:
        """Compare every layer; returns what the operators give, as `JoinedExpert`."""
        x = h.float().expand(len(self._prefix[0]), -1, -1)
        for layer in range(len(self._blocks)):
            given = modulations[2 * layer : 2 * layer + 2]
            exact, operators, other = (
                self._one_layer(layer, form, wide, x, given)
                for form, wide in ((JoinedExpert, True), (JoinedExpert, False), (self._form, False))
            )
            self._note(f'layer {layer}', exact, operators, other, exact - x)
            x = operators
        return x

    def linear(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """Compare a layer before or behind the blocks; returns what the operators give."""
        wide = [None if part is None else part.double() for part in (layer.weight, layer.bias)]
        exact, operators = F.linear(x.double(), *wide), apply(layer, x)
        name = f'the layer of {layer.in_features} to {layer.out_features} numbers'
        self._note(name, exact, operators, self._form.linear(layer, x), exact)
        return operators

    def advance(self, *inputs: Tensor) -> Tensor:
        """Compare the flow's update; returns what the operators give."""
        exact, operators = advance(*[part.double() for part in inputs]), advance(*inputs)
        self._note('the update', exact, operators, self._form.advance(*inputs), exact)
        return operators

    def _note(
        self, name: str, exact: Tensor, operators: Tensor, other: Tensor, contribution: Tensor
    ) -> None:
        scale = float(contribution.abs().max()) or 1.0
        found = [(result - exact).double() / scale for result in (other, operators)]
        means, worst = (
            [float(measure(error)) for error in found]
            for measure in (lambda e: e.square().mean().sqrt(), lambda e: e.abs().max())
        )
        self._errors.append(LayerError(name, means[0], worst[0], means[1], worst[1]))

    def _one_layer(
        self,
        layer: int,
        form: type[JoinedExpert],
        wide: bool,
        x: Tensor,
        modulations: Sequence[Modulation],
    ) -> Tensor:
        """Result (B, T, W) of one layer in a form; `wide`: in float32."""
        block, place = self._blocks[layer], self._places[layer]
        mask, self_past, cross_past = self._prefix
        past = cross_past if block.cross else self_past
        assert past is not None
        keys, values = (part[place : place + 1] for part in past)
        if wide:
            block, keys, values = block.in_float32(), keys.float(), values.float()
        expert = form(
            [block], self._suffix_sees, None if wide else self._kernel, self._static_shapes
        )
        of_kind: tuple[Past | None, Past | None] = (keys, values), None
        expert.load(mask, *(reversed(of_kind) if block.cross else of_kind))
        return expert(x, modulations).clone()


def worst_fault(errors: Sequence[LayerError]) -> str:
    """Return the error of the layer that fits least, in words; empty where all fit."""
    faults = [error for error in errors if not error.fits]
    if not faults:
        return ''
    return max(faults, key=lambda e: math.inf if math.isnan(e.mean) else e.mean).describe()
