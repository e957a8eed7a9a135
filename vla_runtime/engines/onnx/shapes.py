"""Kinds and shapes of everything that goes into and comes out of a bundle's ONNX files.

The export writes them and the engine holds the files to them; `onnx_files` has the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vla_runtime.engines.onnx.files import EXPERT_OUTPUTS, PREFIX_OUTPUTS, Network
from vla_runtime.families.family import PolicyDims

# Name to kind of number (`float32`, `int64`, `bool`, …) and shape.
Tensors = dict[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class GraphShapes:
    """The graphs of one number of prompt rows.

    Attributes:
        dims: of the policy.
        rows: prompt rows.
        precision: of keys and values: `float32`, `float16` or `bfloat16`.
        conditioning: C, numbers of a row of the time table.
    """

    dims: PolicyDims
    rows: int
    precision: str
    conditioning: int

    def inputs(self, network: Network) -> Tensors:
        """What goes into `vision` (one image), `prefix` or `expert`."""
        if network == 'vision':
            return self.images(1)
        return self._prefix() if network == 'prefix' else self._expert()

    def outputs(self, network: Network) -> Tensors:
        """What comes out of `vision`, `prefix` or `expert`."""
        dims = self.dims
        if network == 'vision':
            return {'image_tokens': ('float32', (1, dims.vision.tokens, dims.language.width))}
        if network == 'prefix':
            return {name: self._past()[name] for name in PREFIX_OUTPUTS}
        chunk = (dims.horizon, dims.action_dim)
        shapes = ((1, *chunk), (self.rows, *chunk))
        return {
            name: ('float32', shape) for name, shape in zip(EXPERT_OUTPUTS, shapes, strict=True)
        }

    def images(self, count: int) -> Tensors:
        """The pixels of so many images."""
        size = self.dims.vision.image_size
        return {'pixels': ('float32', (count, 3, size, size))}

    def monolithic(self, steps: int) -> Tensors:
        """What goes into `monolithic`: all cameras, and tables of all denoise steps."""
        per_step: Tensors = {
            'time_conditioning': ('float32', (steps, self.conditioning)),
            't': ('float32', (steps,)),
            'plan_weight': ('float32', (steps, 1, self.dims.horizon, 1)),
        }
        prefix = _without(self._prefix(), ('image_tokens',))
        own = _without(self._expert(), PREFIX_OUTPUTS)
        return self.images(self.dims.cameras) | prefix | own | per_step

    def _prefix(self) -> Tensors:
        dims, prompt = self.dims, (self.rows, self.dims.prompt_length)
        return {
            'image_tokens': ('float32', (dims.cameras, dims.vision.tokens, dims.language.width)),
            'image_mask': ('bool', (dims.cameras,)),
            'tokens': ('int64', prompt),
            'token_mask': ('bool', prompt),
        }

    def _past(self) -> Tensors:
        dims, language = self.dims, self.dims.language
        past = (
            language.depth,
            self.rows,
            language.num_kv_heads,
            dims.prefix_length,
            language.head_dim,
        )
        return {
            'past_key': (self.precision, past),
            'past_value': (self.precision, past),
            'prefix_mask': ('bool', (self.rows, dims.prefix_length)),
        }

    def _expert(self) -> Tensors:
        dims = self.dims
        chunk = (1, dims.horizon, dims.action_dim)
        inputs: Tensors = {
            'x': ('float32', chunk),
            **self._past(),
            'time_conditioning': ('float32', (1, self.conditioning)),
            't': ('float32', ()),
            'dt': ('float32', ()),
            'row_weight': ('float32', (self.rows,)),
            'plan': ('float32', chunk),
            'plan_weight': ('float32', (1, dims.horizon, 1)),
        }
        state: Tensors = {'state': ('float32', (self.rows, dims.state_dim))}
        return inputs | (state if dims.state_dim else {})


def _without(tensors: Mapping[str, tuple[str, tuple[int, ...]]], names: tuple[str, ...]) -> Tensors:
    return {name: kind for name, kind in tensors.items() if name not in names}
