"""Networks of X-VLA: DaViT and BART's encoder as Florence-2 has them, and the transformer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.declarations.xvla import WAVELENGTHS, BartDims, DavitDims, XvlaDims
from vla_runtime.models.base.diffusion_network import DiffusionNetwork
from vla_runtime.models.blocks.attention import attend, repeat_rows
from vla_runtime.models.blocks.layers import LayerNorm, Linear, Projection, QueryLinear, gelu_tanh
from vla_runtime.models.blocks.products import IMAGES
from vla_runtime.models.blocks.transformer import Attention, Block, Mlp

_EPSILON = 1e-5
# Height and width of a feature map.
Size = tuple[int, int]

# --------------------------------------------------------------------------------------------------
# DaViT (arXiv 2204.03645): attention inside windows, then of channels to channels. Maps are tokens
# (n, height * width, C), places row by row.


def as_map(x: Tensor, size: Size) -> Tensor:
    """(n, h * w, C) to (n, C, h, w)."""
    return x.view(x.shape[0], *size, x.shape[2]).permute(0, 3, 1, 2)


def as_tokens(x: Tensor) -> Tensor:
    """(n, C, h, w) to (n, h * w, C)."""
    return x.flatten(2).transpose(1, 2)


class Convolution(nn.Module):
    """The convolution that makes a stage's map, with its norm behind it or, `pre_norm`, before."""

    def __init__(self, dims: DavitDims, stage: int) -> None:
        super().__init__()
        before, after = (3, *dims.channels)[stage : stage + 2]
        self.pre_norm = dims.pre_norms[stage]
        self.conv = nn.Conv2d(
            before, after, dims.kernels[stage], dims.strides[stage], dims.paddings[stage]
        )
        self.norm = LayerNorm(before if self.pre_norm else after, eps=_EPSILON)

    def forward(self, x: Tensor, size: Size) -> Tensor:
        """(n, places before, C before) to (n, places, C)."""
        x = self.norm(x) if self.pre_norm else x
        x = as_tokens(self.conv(as_map(x, size)))
        return x if self.pre_norm else self.norm(x)


class HalfBlock(Block):
    """Attention and MLP, with a convolution of each channel by itself before either."""

    def __init__(self, dims: DavitDims, stage: int, size: Size) -> None:
        width = dims.channels[stage]
        super().__init__(
            lambda: LayerNorm(width, eps=_EPSILON),
            lambda: self.make_attention(dims, stage, size),
            lambda: Mlp(width, dims.mlp_dim[stage], F.gelu),
            way=IMAGES,
        )
        self.size = size
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, groups=width)

    def make_attention(self, dims: DavitDims, stage: int, size: Size) -> Attention:
        return Attention(dims.channels[stage], dims.num_heads[stage], bias=dims.qkv_bias)

    def attended(self, x: Tensor) -> Tensor:
        """What attention gives of normed tokens (n, h * w, C), before the output's layer."""
        raise NotImplementedError

    def convolved(self, x: Tensor, convolution: nn.Module) -> Tensor:
        return x + as_tokens(convolution(as_map(x, self.size)))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """(n, h * w, C) float32 to the same."""
        x = self.convolved(x, self.conv1)
        x = self.attention.add_output(x, self.attended(self.first_norm(x)))
        x = self.convolved(x, self.conv2)
        return cast(Tensor, self.mlp.add_output(x, self.second_norm(x)))


class WindowBlock(HalfBlock):
    """Places of a window see each other, and the zeros that fill windows up."""

    def __init__(self, dims: DavitDims, stage: int, size: Size) -> None:
        super().__init__(dims, stage, size)
        self.window = dims.window

    def attended(self, x: Tensor) -> Tensor:
        (high, wide), edge = self.size, self.window
        down, across = -(-high // edge), -(-wide // edge)
        n, _, width = x.shape
        x = _filled(_filled(x.view(n, high, wide, width), 1, down * edge), 2, across * edge)
        x = x.view(n, down, edge, across, edge, width).permute(0, 1, 3, 2, 4, 5)
        found = attend(*self.attention.project(x.reshape(-1, edge * edge, width)), None)
        found = found.view(n, down, across, edge, edge, width).permute(0, 1, 3, 2, 4, 5)
        found = found.reshape(n, down * edge, across * edge, width)[:, :high, :wide]
        return found.reshape(n, high * wide, width)


def _filled(x: Tensor, axis: int, length: int) -> Tensor:
    """Append zeros along an axis up to this length."""
    shape = list(x.shape)
    shape[axis] = length - shape[axis]
    return torch.cat([x, torch.zeros(shape, device=x.device)], dim=axis) if shape[axis] else x


class ChannelBlock(HalfBlock):
    """Channels of a group see each other: a channel's numbers are its values at all places."""

    def make_attention(self, dims: DavitDims, stage: int, size: Size) -> Attention:
        width = dims.channels[stage]
        attention = Attention(width, dims.groups[stage], bias=dims.qkv_bias)
        # A score is a sum over places.
        attention.q = QueryLinear(width, width, math.prod(size), bias=dims.qkv_bias)
        return attention

    def attended(self, x: Tensor) -> Tensor:
        q, k, v = (part.transpose(2, 3) for part in self.attention.project(x))
        return F.scaled_dot_product_attention(q, k, v).flatten(1, 2).transpose(1, 2)


class DavitVision(nn.Module):
    """Pixels to image tokens of the text's width: a mean, then the places of the last map."""

    def __init__(self, dims: XvlaDims) -> None:
        super().__init__()
        vision = dims.vision
        sizes = vision.map_sizes(dims.image)
        self.sizes = [dims.image, *sizes]
        width = vision.channels[-1]
        self.convs = nn.ModuleList(Convolution(vision, stage) for stage in range(len(sizes)))
        self.stages = nn.ModuleList(
            nn.ModuleList(
                nn.ModuleDict(
                    {
                        'spatial': WindowBlock(vision, stage, size),
                        'channel': ChannelBlock(vision, stage, size),
                    }
                )
                for _ in range(vision.blocks[stage])
            )
            for stage, size in enumerate(sizes)
        )
        self.row_positions = nn.Parameter(torch.zeros(vision.positions, width // 2 + width % 2))
        self.column_positions = nn.Parameter(torch.zeros(vision.positions, width // 2))
        self.projection = Projection(
            width, dims.text.width, input_major=vision.input_major, bias=False
        )
        self.norm = LayerNorm(dims.text.width, eps=_EPSILON)

    def positions(self) -> Tensor:
        """(h * w, C): those of the column, then those of the row."""
        high, wide = self.sizes[-1]
        columns = self.column_positions[:wide][None].expand(high, -1, -1)
        rows = self.row_positions[:high][:, None].expand(-1, wide, -1)
        return torch.cat([columns, rows], dim=2).flatten(0, 1)

    def time_code(self, x: Tensor) -> Tensor:
        """(C,): sines and cosines of a video's first frame, 0 and 1 in turn."""
        return (torch.arange(x.shape[2], device=x.device) % 2).float()

    def stage(self, x: Tensor, stage: int) -> Tensor:
        """Run a stage's blocks over its map (n, places, C)."""
        for block in cast(nn.ModuleList, self.stages[stage]):
            x = block['spatial'](x)  # type: ignore[index]
            x = block['channel'](x)  # type: ignore[index]
        return x

    def forward(self, pixels: Tensor) -> Tensor:
        """Encode images (n, 3, h, w), ImageNet's mean and std, to (n, N, text width)."""
        x = as_tokens(pixels)
        for stage, convolution in enumerate(self.convs):
            x = self.stage(convolution(x, self.sizes[stage]), stage)
        x = x + self.positions() + self.time_code(x)
        x = torch.cat([x.mean(dim=[1], keepdim=True), x], dim=1)
        return cast(Tensor, self.norm(self.projection(x)))


# --------------------------------------------------------------------------------------------------
# BART's encoder (arXiv 1910.13461), with its norms behind the layers.


class EncoderBlock(Block):
    """Attention and MLP with a norm behind each."""

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:  # type: ignore[override]
        attention = self.attention
        x = self.first_norm(attention.add_output(x, attend(*attention.project(x), seen)))
        return cast(Tensor, self.second_norm(self.mlp.add_output(x, x)))


class BartEncoder(nn.Module):
    """An image and a prompt to features; places are counted over both."""

    # Rows of the table before that of the first place.
    OFFSET = 2

    def __init__(self, dims: BartDims, vocabulary: int) -> None:
        super().__init__()
        width = dims.width
        self.scale = math.sqrt(width) if dims.scaled else 1.0
        self.embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Parameter(torch.empty(dims.positions + self.OFFSET, width))
        nn.init.normal_(self.position_embedding, std=0.02)
        self.norm = LayerNorm(width, eps=_EPSILON)
        self.blocks = nn.ModuleList(
            EncoderBlock(
                lambda: LayerNorm(width, eps=_EPSILON),
                lambda: Attention(width, dims.num_heads),
                lambda: Mlp(width, dims.mlp_dim, F.gelu),
                way=IMAGES,
            )
            for _ in range(dims.depth)
        )

    def embed(self, image: Tensor, tokens: Tensor) -> Tensor:
        """Put (R, N, W) and the words (R, L) together at their places, (R, N + L, W)."""
        x = torch.cat([image, self.embedding(tokens).float() * self.scale], dim=1)
        places = self.position_embedding[self.OFFSET : self.OFFSET + x.shape[1]]
        return cast(Tensor, self.norm(x + places))

    def forward(self, x: Tensor, seen: Tensor | None) -> Tensor:
        """(R, N + L, W) to the same; `seen` (R, N + L) bool, None: all."""
        mask = None if seen is None else seen[:, None]
        for block in self.blocks:
            x = block(x, mask)
        return x


# --------------------------------------------------------------------------------------------------

# BART's token of padding.
PADDING = 1


class Xvla(DiffusionNetwork):
    """X-VLA in one of its domains: an encoder of what it sees and hears, and the transformer.

    Shapes: V cameras, N tokens an image, L words, R prompt rows, W width of the text, D that of the
    transformer, P tokens of the prefix, H horizon, A actions, S state.
    """

    dims: XvlaDims
    vision: DavitVision

    def __init__(self, dims: XvlaDims) -> None:
        super().__init__()
        self.dims = dims
        text, head = dims.text.width, dims.head
        self.vision = DavitVision(dims)
        self.text = BartEncoder(dims.text, dims.vocabulary)
        if head.by_domain:
            self.feature_projection: nn.Module = Projection(text, head.width, input_major=True)
            self.view_projection: nn.Module = Projection(text, head.width, input_major=True)
        else:
            self.feature_projection = Linear(text, head.width)
            self.view_projection = Linear(text, head.width)
        self.position_embedding = nn.Parameter(torch.empty(1, head.positions, head.width))
        nn.init.normal_(self.position_embedding, std=0.02)
        self.soft_prompts: nn.Parameter | None = None
        if head.soft_prompts:
            self.soft_prompts = nn.Parameter(torch.empty(head.soft_prompts, head.width))
            nn.init.normal_(self.soft_prompts, std=0.02)
        seen = dims.action_dim + dims.state_dim + head.time_width
        self.action_encoder = Projection(seen, head.width, input_major=True)
        self.blocks = nn.ModuleList(
            Block(
                lambda: LayerNorm(head.width, eps=_EPSILON),
                lambda: Attention(head.width, head.num_heads),
                lambda: Mlp(head.width, head.mlp_dim, gelu_tanh),
                way=IMAGES,
            )
            for _ in range(head.depth)
        )
        self.norm = LayerNorm(head.width, eps=_EPSILON)
        self.action_decoder = Projection(head.width, dims.action_dim, input_major=True)

    def views(self, image_tokens: Tensor, image_mask: Tensor) -> Tensor:
        """Images that are there, in their order, then zeros: (V, N, W) to (views, N, W).

        What is hidden is left out, so that a later camera takes its place.
        """
        places = image_mask[None].long().cumsum(dim=1)[0] - 1
        found = []
        for view in range(len(image_mask)):
            here = torch.logical_and(image_mask, places == view)
            found.append(torch.where(here[:, None, None], image_tokens, 0.0).sum(dim=[0]))
        empty = torch.zeros(image_tokens.shape[1:], device=image_tokens.device)
        return torch.stack(found + [empty] * (self.dims.views - len(found)))

    def prefix(
        self, image_tokens: Tensor, image_mask: Tensor, **rows: Tensor
    ) -> Mapping[str, Tensor]:
        """Return `context` (R, P, D): features, further views and soft prompts, at their places.

        Where padding is not seen, `context_mask` (R, P) too.
        """
        dims, token_mask = self.dims, rows['token_mask']
        tokens = torch.where(token_mask, rows['tokens'], PADDING)
        count = tokens.shape[0]
        views = self.views(image_tokens, image_mask)
        first = views[:1].expand(count, -1, -1)
        seen = None
        if not dims.sees_padding:
            seen = torch.cat([_all(token_mask, first.shape[1]), token_mask], dim=1)
        features = self.text(self.text.embed(first, tokens), seen)
        context = [self.feature_projection(features).float()]
        further = self.view_projection(views[1:].flatten(0, 1)[None]).float()
        context.append(further.expand(count, -1, -1))
        placed = torch.cat(context, dim=1)
        placed = placed + self.places(placed.shape[1], seen)
        parts = [placed]
        if self.soft_prompts is not None:
            parts.append(self.soft_prompts[None].expand(count, -1, -1))
        found = {'context': torch.cat(parts, dim=1)}
        if seen is not None:
            rest = found['context'].shape[1] - seen.shape[1]
            found['context_mask'] = torch.cat([seen, _all(seen, rest)], dim=1)
        return found

    def places(self, length: int, seen: Tensor | None) -> Tensor:
        """Positions of the tokens behind the actions, (1 or R, length, D).

        `seen` (R, N + L): what is not there takes no place.
        """
        first = self.dims.horizon
        table = self.position_embedding[:, first : first + length]
        if seen is None:
            return table
        there = torch.cat([seen, _all(seen, length - seen.shape[1])], dim=1)
        return F.embedding(there.long().cumsum(dim=1) - 1, table[0])

    def time_conditioning(self, times: Tensor) -> Tensor:
        """Rows (N, time_width) of flow times (N,): cosines, then sines."""
        width = self.dims.head.time_width
        half = width // 2
        exponents = torch.arange(half, device=times.device, dtype=torch.float32) / max(half, 1)
        angles = times[:, None] * torch.exp(-math.log(WAVELENGTHS) * exponents)
        odd = torch.zeros(times.shape[0], width % 2, device=times.device)
        return torch.cat([angles.cos(), angles.sin(), odd], dim=1)

    def without_grippers(self, x: Tensor) -> Tensor:
        """Zero the grippers of actions (..., A) or of a state (..., S)."""
        return torch.where(self._is_arm(x), x, 0.0) if self.dims.grippers else x

    def _is_arm(self, x: Tensor) -> Tensor:
        """Which numbers of the last axis are no grippers, (A,) bool."""
        numbers = torch.arange(x.shape[-1], device=x.device)
        found = numbers > -1
        for gripper in self.dims.grippers:
            other = torch.logical_or(numbers < gripper, numbers > gripper)
            found = torch.logical_and(found, other)
        return found

    def action_tokens(
        self, x: Tensor, conditioning: Tensor, batch: int, state: Tensor | None
    ) -> Tensor:
        """Tokens (B, H, D) of noisy actions (B or 1, H, A), state (B, S) and time."""
        horizon = self.dims.horizon
        time = conditioning if conditioning.dim() == 3 else conditioning[:, None]
        parts = [self.without_grippers(x).expand(batch, -1, -1)]
        if state is not None:
            parts.append(self.without_grippers(state)[:, None].expand(-1, horizon, -1))
        parts.append(time.expand(batch, horizon, -1))
        tokens = self.action_encoder(torch.cat(parts, dim=2))
        return cast(Tensor, tokens + self.position_embedding[:, :horizon])

    def velocity(
        self, x: Tensor, past: Mapping[str, Tensor], conditioning: Tensor, **rows: Tensor
    ) -> Tensor:
        """Return the clean actions (B, H, A) that x (B or 1, H, A) shows, grippers from 0 to 1."""
        context, seen = past['context'], past.get('context_mask')
        shared = max(1, x.shape[0] // context.shape[0])
        context = repeat_rows(context, shared)
        batch, horizon = context.shape[0], self.dims.horizon
        mask = None
        if seen is not None:
            seen = repeat_rows(seen, shared)
            mask = torch.cat([_all(seen, horizon), seen], dim=1)[:, None]
        tokens = self.action_tokens(x, conditioning, batch, rows.get('state'))
        h = torch.cat([tokens, context], dim=1)
        *blocks, last = cast('list[Block]', list(self.blocks))
        for block in blocks:
            h = block(h, mask)
        # Of the last layer the actions alone are wanted.
        memory = last.attention.keys_values(last.first_norm(h))
        h = last(h[:, :horizon], mask, memory=memory)
        actions = self.action_decoder(self.norm(h))
        if not self.dims.grippers:
            return cast(Tensor, actions)
        return torch.where(self._is_arm(actions), actions, actions.sigmoid())


def _all(mask: Tensor, length: int) -> Tensor:
    """A mask (R, length) of what is there for each row of another."""
    return torch.ones(mask.shape[0], length, dtype=torch.bool, device=mask.device)


NETWORKS = {'xvla': Xvla}
