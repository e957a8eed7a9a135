"""Dtypes and shapes of all inputs and outputs of a bundle's ONNX files.

The export takes them from the traced network. An engine reads the outputs of vision and prefix off
the files, and checks all others against policy.yaml.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from vla_runtime.bundle.onnx_files import (
    ANSWER_INPUTS,
    IMAGE_INPUTS,
    LOGITS,
    TEXT_INPUT,
    TOKENS,
    Network,
)
from vla_runtime.family.declaration import (
    Family,
    PolicyDims,
    RowInput,
    free_places,
    image_sizes,
    stages,
    token_dims,
)
from vla_runtime.family.noise_schedule import UPDATE_WIDTH

# Name to dtype (`float32`, `int64`, `bool`, …) and shape.
Tensors = dict[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class GraphShapes:
    """Shapes of the graphs for one number of prompt rows.

    Attributes:
        image_tokens: shape (N, W) of the tokens of the image that has most.
        past: outputs of the prefix, which are inputs of the expert (but for the `logits` of a
            `tokens` head).
        conditioning: C, width of a row of the time table.
        text_width: W of the text table's rows, which the prefix takes in place of tokens; None
            where it takes the tokens.
    """

    family: Family
    dims: PolicyDims
    rows: int
    image_tokens: tuple[int, ...]
    past: Mapping[str, tuple[str, tuple[int, ...]]]
    conditioning: int
    text_width: int | None = None

    def inputs(self, network: Network) -> Tensors:
        """Inputs of `vision` (one image of the first size), `prefix` or `expert`."""
        if network == 'vision':
            return image_input(1, image_sizes(self.dims)[0])
        return self._prefix() if network == 'prefix' else self._expert()

    def outputs(self, network: Network) -> Tensors:
        """Outputs of `vision` (of an image with most tokens), `prefix` or `expert`."""
        if network == 'vision':
            return {'image_tokens': ('float32', (1, *self.image_tokens))}
        if network == 'prefix':
            return dict(self.past)
        if self.family.head == 'tokens':
            kind, (layers, rows, heads, _, head_dim) = self.past['prefix_key']
            one = (kind, (layers, rows, heads, head_dim))
            return {
                LOGITS: self.past[LOGITS],
                'token': ('int64', (rows,)),
                'key': one,
                'value': one,
            }
        chunk = (self.dims.horizon, self.dims.action_dim)
        return {'x_next': ('float32', (1, *chunk)), 'velocity': ('float32', (self.rows, *chunk))}

    def images(self) -> Tensors:
        """Inputs of `monolithic` for all cameras' images: one, or one a camera of several sizes."""
        sizes = image_sizes(self.dims)
        if len(set(sizes)) == 1:
            return image_input(len(sizes), sizes[0])
        return {
            f'pixels_{camera}': image_input(1, size)['pixels'] for camera, size in enumerate(sizes)
        }

    def monolithic(self, steps: int) -> Tensors:
        """Inputs of `monolithic`: all cameras, and tables of all denoise steps."""
        per_step: Tensors = {
            'time_conditioning': ('float32', (steps, self._step_row)),
            't': ('float32', (steps,)),
            'plan_weight': ('float32', (steps, 1, self.dims.horizon, 1)),
        }
        prefix = _without(self._prefix(), IMAGE_INPUTS[:1])
        own = _without(self._expert(), self.past)
        return self.images() | prefix | own | per_step

    @property
    def _step_row(self) -> int:
        return self.conditioning * len(stages(self.dims))

    def _prefix(self) -> Tensors:
        cameras, rows = self.dims.cameras, self._rows(self.family.prefix_inputs(self.dims))
        return {
            'image_tokens': ('float32', (cameras, *self.image_tokens)),
            'image_mask': ('bool', (cameras,)),
            **self._with_text(rows),
        }

    def _with_text(self, rows: Tensors) -> Tensors:
        if self.text_width is None:
            return rows
        _, tokens = rows[TOKENS]
        text: Tensors = {TEXT_INPUT: ('float32', (*tokens, self.text_width))}
        return {**_without(rows, [TOKENS]), **text}

    def _pass(self) -> Tensors:
        kind, (layers, rows, heads, _, head_dim) = self.past['prefix_key']
        answer = (kind, (free_places(token_dims(self.dims)), layers, rows, heads, head_dim))
        own: Tensors = {TOKENS: ('int64', (rows, 1)), 'place': ('int64', ())}
        past = _without(self.past, [LOGITS])
        return {**self._with_text(own), **past, **dict.fromkeys(ANSWER_INPUTS, answer)}

    def _expert(self) -> Tensors:
        if self.family.head == 'tokens':
            return self._pass()
        chunk = (1, self.dims.horizon, self.dims.action_dim)
        return {
            'x': ('float32', chunk),
            **self.past,
            'time_conditioning': ('float32', (1, self._step_row)),
            **self._moves(chunk),
            'row_weight': ('float32', (self.rows,)),
            'plan': ('float32', chunk),
            'plan_weight': ('float32', (1, self.dims.horizon, 1)),
            **self._rows(self.family.head_inputs(self.dims)),
        }

    def _moves(self, chunk: tuple[int, ...]) -> Tensors:
        if self.family.has_scheduler:
            return {'update': ('float32', (UPDATE_WIDTH,)), 'step_noise': ('float32', chunk)}
        return {'t': ('float32', ()), 'dt': ('float32', ())}

    def _rows(self, inputs: Mapping[str, RowInput]) -> Tensors:
        return {name: (given.kind, (self.rows, *given.shape)) for name, given in inputs.items()}


def image_input(count: int, size: tuple[int, int]) -> Tensors:
    """Input `pixels` of `vision` for so many images of one size (height, width)."""
    return {'pixels': ('float32', (count, 3, *size))}


def _without(tensors: Mapping[str, tuple[str, tuple[int, ...]]], names: Collection[str]) -> Tensors:
    return {name: kind for name, kind in tensors.items() if name not in names}
