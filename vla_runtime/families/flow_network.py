"""Interface of the network of a family, by the kind of its head; networks without numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vla_runtime.families.blocks.flow_update import advance
from vla_runtime.family.declaration import Family, PolicyDims
from vla_runtime.family.listing import family_module, find_in_folder


class FlowNetwork(nn.Module):
    """Vision encoder, prefix and action expert of one policy.

    Shapes: V cameras, N tokens an image, W width of the language model, R prompt rows, H horizon,
    A padded action dimension, C numbers per row of the time table.

    Attributes:
        fused_type: class of the fused form, set by `build_network`; None: a family without one.
        expert_type: class of the head's layers over one prefix, where they are `FusedBlock`s:
            `FusedExpert`; an engine may set another form before it lays a prefix out. None: other
            heads.
        vision: module, pixels (n, 3, S, S) float32 in [-1, 1] to image tokens (n, N, W) float32;
            with `image_sizes` in the dimensions (n, 3, height, width) of any of those sizes, N
            following the size, in the scale of the bundle's `normalisation.images`.
    """

    family: Family
    dims: PolicyDims
    fused_type: Callable[[Any, bool], FlowNetwork] | None = None
    expert_type: Any = None
    vision: nn.Module

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

    def fused(self, static_shapes: bool = False) -> FlowNetwork:
        """Return a network of the same numbers, up to rounding, in fewer operators.

        A PyTorch engine calls this once, after `fold_constants`, and then runs what it returns, by
        default this network. This network's parameters may become views of the other's, and it
        stays usable. With `static_shapes` no shape may depend on numbers, so that CUDA graphs can
        be captured.
        """
        return self if self.fused_type is None else self.fused_type(self, static_shapes)

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
    folder, family = find_in_folder(name)
    module = family_module(folder, 'networks')
    build: Callable[[PolicyDims], FlowNetwork] = module.NETWORKS[name]
    network = build(dims)
    network.family = family
    network.fused_type = getattr(module, 'FUSED', {}).get(name)
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
