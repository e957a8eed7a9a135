"""Counts of a policy's networks, taken while they run on PyTorch's `meta` device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from vla_runtime.family.counts import NetworkCounts
from vla_runtime.family.declaration import (
    TOKENS,
    PolicyDims,
    distinct_image_sizes,
    image_sizes,
    stages,
)
from vla_runtime.models.base.flow_network import empty_network
from vla_runtime.models.base.token_network import TokenNetwork
from vla_runtime.models.blocks.layers import matrix_names
from vla_runtime.models.shapes.meta_shapes import OperatorShapeCache
from vla_runtime.models.shapes.traced_shapes import Part, parameters_of, row_tensors, trace_shapes

_FLOAT32 = 4


class MetaRuns:
    """Run each network of a policy once and count its work."""

    def __init__(self, family: str, dims: PolicyDims) -> None:
        self._dims = dims
        self._network = network = empty_network(family, dims)
        self._matrices = matrix_names(network)
        self._shapes = trace_shapes(network)
        self._read = parameters_of(network, self._shapes)

    def weights(self) -> tuple[int, int, int]:
        """Count the numbers in matrices and in all other parameters, and bytes of packed ones."""
        return self._split(self._network.state_dict())

    def vision(self) -> NetworkCounts:
        """Count a run of one image; of images of several sizes, the mean over the cameras."""
        counts = {size: self._vision(size) for size in distinct_image_sizes(self._dims)}
        if len(counts) == 1:
            return next(iter(counts.values()))
        each = [counts[size] for size in image_sizes(self._dims)]
        return replace(
            each[0],
            flops=sum(count.flops for count in each) // len(each),
            data_bytes=sum(count.data_bytes for count in each) // len(each),
        )

    def _vision(self, size: tuple[int, int]) -> NetworkCounts:
        pixels = _zeros(1, 3, *size)
        return self._count('vision', lambda: self._network.vision(pixels), [pixels], past=0)

    def prefix(self, rows: int) -> NetworkCounts:
        """Count a run of all images and `rows` prompt rows."""
        images, tokens, run = self._prefix(rows)
        past = self._past(rows)
        return self._count('prefix', run, [images], past=past, outputs=False, tokens=tokens)

    def step(self, rows: int) -> NetworkCounts:
        """Count a run of the head over `rows` prompt rows and one chunk, or one token of it."""
        dims, network = self._dims, self._network
        if isinstance(network, TokenNetwork):
            return self._token(network, rows)
        chunk = (dims.horizon, dims.action_dim)
        x, dt = _zeros(1, *chunk), _zeros()
        conditioning = _zeros(1, self._shapes.conditioning * len(stages(dims)))
        past = self._shapes.past_buffers(rows)
        head = row_tensors(network.family.head_inputs(dims), rows)
        return self._count(
            'head',
            lambda: network.step_velocity(x, past, conditioning, dt, **head),
            # x goes in and comes out.
            [x, x, conditioning, *head.values()],
            past=self._past(rows),
        )

    def passes(self) -> int:
        """Runs of the head for each step: 1, or one for each token that is read back."""
        network = self._network
        return network.dims.answer_length - 1 if isinstance(network, TokenNetwork) else 1

    def _token(self, network: TokenNetwork, rows: int) -> NetworkCounts:
        past = self._shapes.past_buffers(rows)
        answer = network.answer_places(past)
        tokens = torch.zeros(rows, 1, dtype=torch.int64, device='meta')
        place = torch.zeros((), dtype=torch.int64, device='meta')
        return self._count(
            'head',
            lambda: network.read_token(tokens, place, past, *answer)[:2],
            [],
            past=self._past(rows) + sum(cache.numel() for cache in answer),
            tokens=tokens,
        )

    def widest(self) -> int:
        """Numbers that the widest operation of a prefix of one row reads and writes."""
        *_, run = self._prefix(1)
        with _Widest() as widest, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            run()
        return widest.numbers

    def _prefix(
        self, rows: int
    ) -> tuple[Tensor, Tensor | None, Callable[[], Mapping[str, Tensor]]]:
        """Image tokens, prompt tokens (None without language), and a run over them."""
        dims, network = self._dims, self._network
        images = _zeros(dims.cameras, *self._shapes.image_tokens)
        mask = torch.ones(dims.cameras, dtype=torch.bool, device='meta')
        inputs = row_tensors(network.family.prefix_inputs(dims), rows)
        return images, inputs.get(TOKENS), lambda: network.prefix(images, mask, **inputs)

    def _past(self, rows: int) -> int:
        """Count the numbers handed to the head; masks are too small to count."""
        return sum(
            torch.Size(tensor.for_rows(rows)).numel()
            for tensor in self._shapes.past.values()
            if tensor.dtype.is_floating_point
        )

    @torch.no_grad()
    def _count(
        self,
        part: Part,
        run: Callable[[], Any],
        inputs: list[Tensor],
        *,
        past: int,
        outputs: bool = True,
        tokens: Tensor | None = None,
    ) -> NetworkCounts:
        tables = _LookedUp(self._network, tokens)
        with _Counted() as counted, sdpa_kernel(SDPBackend.MATH), tables:
            found = [tensor for tensor in tree_leaves(run()) if tensor.is_floating_point()]
        matrices, others, packed = self._split(self._read[part])
        moved = [*inputs, *(found if outputs else [])]
        return NetworkCounts(
            flops=counted.flops,
            matrices=matrices,
            looked_up=tables.unread,
            hosted=tables.hosted,
            others=others,
            past=past,
            data_bytes=sum(tensor.numel() for tensor in moved) * _FLOAT32,
            packed=packed,
        )

    def _split(self, names: Iterable[str]) -> tuple[int, int, int]:
        weights, counts = self._network.state_dict(), [0, 0, 0]
        for name in names:
            kind = 0 if name in self._matrices else 1 if weights[name].is_floating_point() else 2
            counts[kind] += weights[name].numel()
        matrices, others, packed = counts
        return matrices, others, packed


class _LookedUp:
    """Context that counts the numbers of text tables which a run does not read."""

    def __init__(self, network: nn.Module, tokens: Tensor | None) -> None:
        self._tokens = tokens
        self._tables = [module for module in network.modules() if isinstance(module, nn.Embedding)]
        self._hooks: list[Any] = []
        self.unread = 0
        # Numbers of the table that the tokens are looked up in as they come.
        self.hosted = 0

    def __enter__(self) -> None:
        def look_up(table: nn.Module, inputs: tuple[Tensor, ...], _: Tensor) -> None:
            assert isinstance(table, nn.Embedding)
            read = min(inputs[0].numel(), table.num_embeddings) * table.embedding_dim
            if inputs[0] is self._tokens:
                self.hosted = table.weight.numel()
            self.unread += table.weight.numel() - read

        self._hooks = [table.register_forward_hook(look_up) for table in self._tables]

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


class _Counted(OperatorShapeCache):
    """Floating point operations of all operators, as PyTorch counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def ran(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        if formula := flop_registry.get(func.overloadpacket):
            self.flops += formula(*args, **kwargs, out_val=result)


class _Widest(OperatorShapeCache):
    """The most numbers that one operator reads and writes, weights left out."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def ran(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Compare an operator with the widest before."""
        moved = 0
        for item in (*args, result):
            for one in item if isinstance(item, (list, tuple)) else (item,):
                if isinstance(one, Tensor) and one.is_floating_point():
                    moved += 0 if isinstance(one, nn.Parameter) else one.numel()
        self.numbers = max(self.numbers, moved)


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, device='meta')
