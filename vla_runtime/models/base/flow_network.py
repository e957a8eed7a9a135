"""Interface of the network of a family, by the kind of its head; networks without numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vla_runtime.family.declaration import Family, PolicyDims
from vla_runtime.family.listing import find_in_file, networks_of
from vla_runtime.models.blocks.flow_update import advance
from vla_runtime.models.blocks.transformer import Block, Stack


class FlowNetwork(nn.Module):
    """Vision encoder, prefix and action expert of one policy.

    Shapes: V cameras, N tokens an image, W width of the language model, R prompt rows, H horizon,
    A padded action dimension, C numbers per row of the time table.

    Attributes:
        expert_type: class of the joined head's layers over one prefix, `JoinedExpert`; an engine
            may set another form before it lays a prefix out. None: other heads.
        static_shapes, is_joined: as of `join`.
        vision: module, pixels (n, 3, S, S) float32 in [-1, 1] to image tokens (n, N, W) float32;
            with `image_sizes` in the dimensions (n, 3, height, width) of any of those sizes, N
            following the size, in the scale of the bundle's `normalisation.images`.
    """

    family: Family
    dims: PolicyDims
    expert_type: Any = None
    vision: nn.Module
    static_shapes = False
    is_joined = False

    def prefix(
        self, image_tokens: Tensor, image_mask: Tensor, **rows: Tensor
    ) -> Mapping[str, Tensor]:
        """Compute what the head attends to, once per observation.

        Args:
            image_tokens: (V, N, W) float32, shared by all rows; image_mask: (V,) bool. A
                hidden camera's tokens must not matter, not even NaN. With images of several sizes
                N is that of the image with most tokens; the tokens of a smaller one come first
                and zeros follow.
            **rows: the family's `prefix_inputs`, (R, …) each.

        Returns:
            tensors by the names under which `velocity` takes them; exactly one axis of each
            depends on R, and its length is R
        """
        raise NotImplementedError

    def fold_constants(self) -> None:
        """Compute now what depends on weights alone; by default there is nothing.

        A PyTorch engine calls this once, when all weights are there for good. In float32 the
        numbers of the network must stay. Where the matrices are in bfloat16, convolutions may be
        put into it too.
        """

    def join(self, static_shapes: bool = False) -> None:
        """Join layers that read the same numbers, for inference: as before, up to rounding.

        A PyTorch engine calls this once, after `fold_constants`. Weights become views of what they
        are joined in, take no gradients any more, and are neither changed nor moved afterwards;
        where gradients of other tensors are recorded each layer goes on computing by itself.

        Args:
            static_shapes: no shape may depend on numbers, so that CUDA graphs can be captured.

        Raises:
            RuntimeError: joined already: what an engine has captured reads it.
        """
        if self.is_joined:
            raise RuntimeError('a network is of one engine; others take its `twin`')
        self.requires_grad_(False)
        with torch.no_grad():
            self.join_layers()
        self.static_shapes = static_shapes
        self.is_joined = True

    def join_layers(self) -> None:
        """Join what `join` joins: the products of all blocks."""
        for module in self.modules():
            if isinstance(module, (Block, Stack)):
                module.join()

    def load_state_dict(self, *given: Any, **options: Any) -> Any:
        """As of PyTorch; RuntimeError: joined, what is computed already would stay."""
        self._refuse_joined('take other weights')
        return super().load_state_dict(*given, **options)

    def _apply(self, *given: Any, **options: Any) -> Any:
        self._refuse_joined('move to another device or dtype')
        return super()._apply(*given, **options)

    def _refuse_joined(self, what: str) -> None:
        if self.is_joined:
            raise RuntimeError(f'a joined network cannot {what}: do that before an engine is made')

    def twin(self) -> FlowNetwork:
        """Return a network over the same weights that nothing has joined.

        They are shared until it is joined, which copies matrices.
        """
        other = empty_network(self.family.name, self.dims)
        # Tensors of inference mode can be of a network of that mode alone.
        with torch.inference_mode(any(one.is_inference() for one in self.parameters())):
            other.load_state_dict(self.state_dict(), assign=True)
        return other

    def prepare_prefix(self, past: Mapping[str, Tensor], into: Any = None) -> Any:
        """Compute once per prefix what `velocity` takes as `past`; by default nothing changes.

        Args:
            past: outputs of `prefix`, R rows.
            into: result of an earlier call with as many rows; it is overwritten and returned. With
                static shapes its tensors stay where they are.
        """
        return past

    def join_prefixes(self, prepared: Sequence[Any], row_axes: Mapping[str, int]) -> Any:
        """Return what `velocity` takes as `past` for the rows of several prefixes together.

        Each row's numbers stay those that it has alone. Without static shapes only.

        Args:
            prepared: results of `prepare_prefix`.
            row_axes: axis of each output of `prefix` that counts the rows.
        """
        return {
            name: torch.cat([past[name] for past in prepared], dim=axis)
            for name, axis in row_axes.items()
        }

    def split_conditioning(self, conditioning: Tensor) -> Any:
        """Compute once per step of a schedule what `velocity` takes as `conditioning`."""
        return conditioning

    def time_conditioning(self, times: Tensor) -> Tensor:
        """Return the head's conditioning on flow times (N,): one row (C,) per time."""
        raise NotImplementedError

    def advance(self, past: Any, *inputs: Tensor) -> Tensor:
        """Move x one step along the flow (`flow_update.advance`); `past` as `velocity` took it."""
        return advance(*inputs)

    def velocity(
        self, x: Tensor, past: Mapping[str, Tensor], conditioning: Tensor, **rows: Tensor
    ) -> Tensor:
        """Return the flow's velocity at noisy actions x; t runs from 1 (noise) to 0 (actions).

        Args:
            x: (B or 1, H, A) float32; one x serves all rows.
            past: outputs of `prefix` for B rows.
            conditioning: (B or 1, C) rows of `time_conditioning`; (B or 1, H, C) with one row for
                each action.
            **rows: the family's `head_inputs`, (B, …) each.

        Returns:
            (B, H, A) float32
        """
        raise NotImplementedError

    def step_velocity(
        self,
        x: Tensor,
        past: Mapping[str, Tensor],
        conditioning: Tensor,
        dt: Tensor,
        **rows: Tensor,
    ) -> Tensor:
        """Return the velocity that a whole step moves x by; by default that at its beginning.

        Each prompt row takes the step by itself: guidance mixes what they return.

        Args:
            x, past, rows: as of `velocity`.
            conditioning: as of `velocity`, with the S rows of the step's times side by side
                (`family.step_schedule.step_rows`).
            dt: (), step; a `diffusion` head has another number here and does not read it.
        """
        return self.velocity(x, past, conditioning, **rows)


class SinglePassNetwork(FlowNetwork):
    """Network of a `single` head: actions in one pass, without noise and time.

    Engines run it as a flow of one step from zero noise: x is 0, t is 1, the step is -1, and the
    velocity is minus the actions. So x minus the velocity is the actions, bit for bit.
    """

    def actions(self, past: Mapping[str, Tensor], **rows: Tensor) -> Tensor:
        """Return the normalised actions (R, H, A) float32 of R rows; `rows` as of `velocity`."""
        raise NotImplementedError

    def time_conditioning(self, times: Tensor) -> Tensor:
        return torch.zeros(times.shape[0], 1, device=times.device)

    def velocity(
        self, x: Tensor, past: Mapping[str, Tensor], conditioning: Tensor, **rows: Tensor
    ) -> Tensor:
        return -self.actions(past, **rows)


def build_network(name: str, dims: PolicyDims) -> FlowNetwork:
    """Build an untrained network of a family; ValueError for an unknown one."""
    file, family = find_in_file(name)
    module = networks_of(file)
    build: Callable[[PolicyDims], FlowNetwork] = module.NETWORKS[name]
    network = build(dims)
    network.family = family
    return network


def empty_network(name: str, dims: PolicyDims) -> FlowNetwork:
    """Build a network with shapes but no numbers, on `meta`; errors as `build_network`."""
    with torch.device('meta'), _NothingDrawn():
        return build_network(name, dims)


def weight_shapes(name: str, dims: PolicyDims) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a network's tensors; allocates nothing."""
    state = empty_network(name, dims).state_dict()
    return {tensor: tuple(value.shape) for tensor, value in state.items()}


# What layers draw their first weights with.
_DRAWN_BY = {nn.init.kaiming_uniform_, nn.init.normal_, nn.init.uniform_}


class _NothingDrawn(TorchFunctionMode):
    """Draw no weights: half the time of building a network on `meta`.

    For `normal_` there PyTorch imports its compiler, 3 s once.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWN_BY:
            return kwargs['tensor']
        return func(*args, **kwargs)
