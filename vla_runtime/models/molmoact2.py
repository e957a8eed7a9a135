"""Networks of MolmoAct2: Molmo's tower and language model, and an expert that reads its keys.

The expert's cross-attention sees the language model's rotated keys, by queries that are not
rotated: its numbers depend on the positions of the prompt, which are counted from its first token.
MolmoAct2's flow runs from 0 to 1; `time_conditioning` and `velocity` turn time and velocity round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.declarations.molmoact2 import (
    WAVELENGTHS,
    ActionExpertDims,
    LanguageDims,
    MolmoAct2Dims,
    TowerDims,
)
from vla_runtime.models.base.flow_network import FlowNetwork
from vla_runtime.models.blocks.attention import Rotary, SplitHeads, attend, rotary
from vla_runtime.models.blocks.layers import (
    LayerNorm,
    Linear,
    Modulation,
    QueryLinear,
    QueryNorm,
    RmsNorm,
    gelu_tanh,
    modulate,
    normalise_rms,
)
from vla_runtime.models.blocks.products import FEW, IMAGES, MANY
from vla_runtime.models.blocks.resize import bicubic_weights
from vla_runtime.models.blocks.transformer import Attention, Block, GatedMlp, Mlp, Stack

# --------------------------------------------------------------------------------------------------
# Molmo's vision tower (arXiv 2409.17146): SigLIP over crops, and attention over windows of patches.


class PatchLayer(nn.Module):
    """Square patches to tokens; the numbers of a patch are by row, column and channel."""

    def __init__(self, dims: TowerDims) -> None:
        super().__init__()
        self.size = dims.patch_size
        self.weight = nn.Parameter(torch.empty(dims.width, 3 * dims.patch_size**2))
        self.bias = nn.Parameter(torch.zeros(dims.width))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, pixels: Tensor) -> Tensor:
        """(n, 3, S, S) to (n, patches, W), patches row by row."""
        n, channels, high, wide = pixels.shape
        rows, columns = high // self.size, wide // self.size
        patches = pixels.view(n, channels, rows, self.size, columns, self.size)
        patches = patches.permute(0, 2, 4, 3, 5, 1).reshape(n, rows * columns, -1)
        return F.linear(patches, self.weight, self.bias)


class WindowPooling(SplitHeads):
    """The mean of a window's patches attends to them."""

    def __init__(self, dims: MolmoAct2Dims) -> None:
        super().__init__()
        pooling, inputs = dims.pooling, dims.vision.width * len(dims.vision.layers)
        self.window, self.masked, self.head_dim = pooling.window, pooling.masked, pooling.head_dim
        queries, keys = (n * self.head_dim for n in (pooling.num_heads, pooling.num_kv_heads))
        self.q = QueryLinear(inputs, queries, self.head_dim)
        self.k, self.v = Linear(inputs, keys), Linear(inputs, keys)
        self.out = Linear(queries, pooling.width)

    def cut(self, x: Tensor) -> Tensor:
        """Maps (n, h, w, C) to windows (n, windows, patches, C), zeros where the map ends."""
        n, _, _, channels = x.shape
        for axis, edge in enumerate(self.window, start=1):
            missing = -x.shape[axis] % edge
            before, after = list(x.shape), list(x.shape)
            before[axis], after[axis] = missing // 2, (missing + 1) // 2
            sides = [torch.zeros(one, device=x.device) for one in (before, after)]
            x = torch.cat([sides[0], x, sides[1]], dim=axis) if missing else x
        high, wide = self.window
        x = x.view(n, x.shape[1] // high, high, x.shape[2] // wide, wide, channels)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(n, -1, high * wide, channels)

    def forward(self, maps: Tensor) -> Tensor:
        """(n, h, w, C) to (n, windows, W) float32."""
        windows = self.cut(maps)
        n, count, patches, _ = windows.shape
        windows = windows.flatten(0, 1)
        total, seen = windows.sum(dim=[1], keepdim=True), None
        if self.masked:
            there = self.cut(torch.ones(1, *maps.shape[1:3], 1, device=maps.device))
            there = there.expand(n, -1, -1, -1).flatten(0, 1)
            mean = total / there.sum(dim=[1], keepdim=True)
            seen = there[:, None, :, 0] > 0.0
        else:
            mean = total / patches
        q, k, v = (
            self.heads(layer(x))
            for layer, x in ((self.q, mean), (self.k, windows), (self.v, windows))
        )
        found: Tensor = self.out(attend(q, k, v, seen)).float()
        return found.view(n, count, -1)


def tower_block(dims: TowerDims) -> Block:
    return Block(
        lambda: LayerNorm(dims.width, eps=1e-6),
        lambda: Attention(
            dims.width, dims.num_heads, kv_heads=dims.num_kv_heads, head_dim=dims.head_dim
        ),
        lambda: Mlp(dims.width, dims.mlp_dim, gelu_tanh),
        way=IMAGES,
    )


class MolmoVision(nn.Module):
    """Pixels to image tokens: of the whole image, then of its tiles if it has any."""

    def __init__(self, dims: MolmoAct2Dims) -> None:
        super().__init__()
        vision, self.dims = dims.vision, dims
        self.patch_embedding = PatchLayer(vision)
        self.position_embedding = nn.Parameter(torch.empty(vision.positions**2, vision.width))
        nn.init.normal_(self.position_embedding, std=0.02)
        self.blocks = nn.ModuleList(tower_block(vision) for _ in range(vision.depth))
        self.pooling = WindowPooling(dims)
        self.projector = GatedMlp(
            dims.pooling.width, dims.pooling.mlp_dim, F.silu, out=dims.language.width
        )

    def positions(self) -> Tensor:
        """(patches, W), of the table or between its rows."""
        vision = self.dims.vision
        if vision.positions == vision.grid:
            return self.position_embedding
        weights = bicubic_weights(vision.positions, vision.grid, self.position_embedding.device)
        rows = weights @ self.position_embedding.view(vision.positions, -1)
        rows = rows.view(vision.grid, vision.positions, vision.width)
        return (weights @ rows).flatten(0, 1)

    def crops(self, pixels: Tensor) -> Tensor:
        """(n, 3, rows * S, columns * S) to (n * crops, 3, S, S), row by row; the first is whole."""
        edge = self.dims.vision.image_size
        n, channels, high, wide = pixels.shape
        rows, columns = high // edge, wide // edge
        cut = pixels.view(n, channels, rows, edge, columns, edge).permute(0, 2, 4, 1, 3, 5)
        if self.dims.tilings is not None:
            # Below the whole image in small there is nothing.
            cut = torch.cat([cut[:, :1, :1].flatten(1, 2), cut[:, :, 1:].flatten(1, 2)], dim=1)
        else:
            cut = cut.flatten(1, 2)
        return cut.flatten(0, 1)

    def features(self, crops: Tensor) -> Tensor:
        """(n, 3, S, S) to (n, patches, C): outputs of the layers that are read, side by side."""
        x, found = self.patch_embedding(crops) + self.positions(), {}
        for index, block in enumerate(self.blocks, start=1):
            x = block(x)
            # A joined block may overwrite its input.
            found[index] = x.clone() if index in self.dims.vision.layers else x
        return torch.cat([found[layer] for layer in self.dims.vision.layers], dim=2)

    def joined(self, tiles: Tensor, rows: int, columns: int) -> Tensor:
        """Patches of tiles (n, rows * columns, g, g, C) as one map, each patch once."""
        (first, last), grid = self.dims.margins, tiles.shape[2]

        def kept(index: int, count: int) -> slice:
            return slice(first if index else 0, grid if index == count - 1 else grid - last)

        lines = [
            torch.cat(
                [
                    tiles[:, row * columns + column, kept(row, rows), kept(column, columns)]
                    for column in range(columns)
                ],
                dim=2,
            )
            for row in range(rows)
        ]
        return torch.cat(lines, dim=1)

    def pooled(self, pixels: Tensor) -> Tensor:
        """(n, 3, height, width) to windows of the whole image, then of its tiles, (n, N, W)."""
        n, grid, edge = pixels.shape[0], self.dims.vision.grid, self.dims.vision.image_size
        features = self.features(self.crops(pixels))
        features = features.view(n, -1, grid, grid, features.shape[2])
        found = [self.pooling(features[:, 0])]
        if self.dims.tilings is not None:
            rows, columns = pixels.shape[2] // edge, pixels.shape[3] // edge - 1
            found.append(self.pooling(self.joined(features[:, 1:], rows, columns)))
        return torch.cat(found, dim=1)

    def forward(self, pixels: Tensor) -> Tensor:
        """Encode pictures (n, 3, height, width) in [-1, 1] to (n, N, language width) float32."""
        return self.projector(self.pooled(pixels)).float()


# --------------------------------------------------------------------------------------------------
# The language model.


class TogetherNormed(Attention):
    """Attention whose norms are of all heads together."""

    def __init__(self, dims: LanguageDims, epsilon: float, **options: Any) -> None:
        super().__init__(dims.width, dims.num_heads, head_epsilon=epsilon, **options)
        self.q_norm = QueryNorm(dims.num_heads * dims.head_dim, epsilon)
        self.q_norm.query_scale = dims.head_dim**-0.5
        self.k_norm = RmsNorm(dims.num_kv_heads * dims.head_dim, epsilon)

    def heads(self, projected: Tensor, norm: nn.Module | None = None) -> Tensor:
        return super().heads(projected if norm is None else norm(projected))


class NormedAfter(Block):
    """A block whose norms stand behind attention and MLP."""

    def project(
        self, x: Tensor, rotation: Rotary | None, modulation: Modulation | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.attention.project(x, rotation)

    def combine(
        self,
        x: Tensor,
        attended: Tensor,
        first: Modulation | None = None,
        second: Modulation | None = None,
    ) -> Tensor:
        x = x + self.first_norm(self.attention.output(attended))
        return cast(Tensor, x + self.second_norm(self.mlp(x)))


def language_model(dims: LanguageDims, epsilon: float, vocabulary: int) -> Stack:
    """The decoder without its last norm: all that is read of it are keys and values."""
    options: dict[str, Any] = {
        'kv_heads': dims.num_kv_heads,
        'head_dim': dims.head_dim,
        'bias': dims.bias,
        'out_bias': False,
    }

    def attention() -> Attention:
        if dims.head_norm == 'together':
            return TogetherNormed(dims, epsilon, **options)
        each = epsilon if dims.head_norm == 'each' else None
        return Attention(dims.width, dims.num_heads, head_epsilon=each, **options)

    def block(layer: int) -> Block:
        return (NormedAfter if dims.norm_after else Block)(
            lambda: RmsNorm(dims.width, epsilon),
            attention,
            lambda: GatedMlp(dims.width, dims.mlp_dim, F.silu),
            names=('input_norm', 'post_norm'),
            way=MANY,
        )

    return Stack(dims, block, nn.Identity, vocabulary=vocabulary)


# --------------------------------------------------------------------------------------------------
# The expert.


class PlainRms(nn.Module):
    """RMSNorm without a weight, in float32."""

    def forward(self, x: Tensor, modulation: Modulation | None = None) -> Tensor:
        return modulate(normalise_rms(x), modulation)


class ExpertAttention(Attention):
    """Attention of the expert, whose norms have no weight that could hold the scores' scale."""

    def __init__(self, dims: ActionExpertDims, memory_width: int | None = None) -> None:
        super().__init__(dims.width, dims.num_heads, memory_width=memory_width)
        self.q = Linear(dims.width, dims.width)
        if dims.head_norm:
            self.q_norm, self.k_norm = PlainRms(), PlainRms()

    def scaled(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        """Attend, the scores' scale in the queries."""
        return attend(q * self.head_dim**-0.5, k, v, seen, scaled=True)


class CrossAttention(ExpertAttention):
    """Queries alone: keys and values are the language model's, through layers of all blocks."""

    def __init__(self, dims: ActionExpertDims) -> None:
        super().__init__(dims, memory_width=dims.width)
        del self.k, self.v


class ExpertBlock(Block):
    """Self-attention, attention to the language model's layer, and MLP, each modulated."""

    def __init__(self, dims: ActionExpertDims) -> None:
        super().__init__(
            PlainRms,
            lambda: ExpertAttention(dims),
            lambda: GatedMlp(dims.width, dims.mlp_dim, F.silu, bias=True),
            way=FEW,
        )
        self.cross = CrossAttention(dims)
        self.modulation = nn.Linear(dims.width, 9 * dims.width)

    def join(self) -> None:
        super().join()
        self.cross.join(self.way)

    def modulated(
        self, x: Tensor, rotation: Rotary, memory: tuple[Tensor, ...], rows: Tensor
    ) -> Tensor:
        """Run over x (B, H, W); `memory`: keys, values and what of them is seen; `rows` (…, 9W)."""
        parts = rows.chunk(9, dim=-1)
        own, cross, mlp = (
            (1.0 + parts[n + 1], parts[n], parts[n + 2]) for n in range(0, len(parts), 3)
        )
        q, k, v = self.attention.project(self.first_norm(x, own), rotation)
        attention = cast(ExpertAttention, self.attention)
        x = x + own[2] * attention.output(attention.scaled(q, k, v, None)).float()
        q = self.cross.queries(self.first_norm(x, cross))
        x = x + cross[2] * self.cross.output(self.cross.scaled(q, *memory)).float()
        return cast(Tensor, x + mlp[2] * self.mlp(self.second_norm(x, mlp)).float())


class ActionExpert(nn.Module):
    """Noisy actions to their velocity."""

    def __init__(self, dims: ActionExpertDims, actions: int, context: int) -> None:
        super().__init__()
        width, self.dims = dims.width, dims
        self.action_in = nn.Linear(actions, width)
        self.time_in = nn.Linear(dims.time_width, width)
        self.time_out = nn.Linear(width, width)
        self.context_k = Linear(context, width, bias=False)
        self.context_v = Linear(context, width, bias=False)
        self.blocks = nn.ModuleList(ExpertBlock(dims) for _ in range(dims.depth))
        self.norm = PlainRms()
        self.out_modulation = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, actions)

    @property
    def layers(self) -> list[ExpertBlock]:
        return [cast(ExpertBlock, block) for block in self.blocks]

    def memory(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (…, R, kv_heads, P, D) of the language model to (…, R, heads, P, d)."""
        found = []
        for layer, x in ((self.context_k, keys), (self.context_v, values)):
            x = layer(x.transpose(-3, -2).flatten(-2)).float()
            x = normalise_rms(x) if self.dims.context_norm else x
            found.append(x.unflatten(-1, (self.dims.num_heads, -1)).transpose(-3, -2))
        k, v = found
        return normalise_rms(k) if self.dims.head_norm else k, v

    def time_conditioning(self, times: Tensor) -> Tensor:
        """Modulations of all blocks and of the last layer, (N,) to (N, (9 * depth + 2) * W)."""
        half = self.dims.time_width // 2
        places = torch.arange(half, device=times.device).float() * -math.log(WAVELENGTHS)
        angles = (1.0 - times)[:, None] * (places / max(half - 1, 1)).exp()
        code = torch.cat([angles.sin(), angles.cos()], dim=1)
        embedded = F.silu(self.time_out(F.silu(self.time_in(code))))
        layers = [*(block.modulation for block in self.layers), self.out_modulation]
        return torch.cat([layer(embedded) for layer in layers], dim=1)

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, seen: Tensor, conditioning: Tensor
    ) -> Tensor:
        """(B or 1, H, A) to the velocity (B, H, A), from noise to actions."""
        width, batch = self.dims.width, seen.shape[0]
        rows = conditioning if conditioning.dim() == 3 else conditioning[:, None]
        h = self.action_in(x).expand(batch, -1, -1)
        places = torch.arange(x.shape[1], device=x.device)
        rotation = rotary(places[None], width // self.dims.num_heads)
        for index, block in enumerate(self.layers):
            part = rows[..., index * 9 * width : (index + 1) * 9 * width]
            h = block.modulated(h, rotation, (keys[index], values[index], seen[:, None]), part)
        shift, scale = rows[..., -2 * width :].chunk(2, dim=-1)
        return cast(Tensor, self.out(self.norm(h, (1.0 + scale, shift, None))))


# --------------------------------------------------------------------------------------------------


class MolmoAct2(FlowNetwork):
    """Tower, language model and expert.

    Shapes: R prompt rows, V cameras, N tokens an image, L words, P tokens of the prefix, H horizon,
    A padded actions, W width of the language model.
    """

    dims: MolmoAct2Dims
    vision: MolmoVision

    def __init__(self, dims: MolmoAct2Dims) -> None:
        super().__init__()
        self.dims = dims
        language = dims.language
        self.vision = MolmoVision(dims)
        self.language = language_model(language, dims.rms_epsilon, dims.vocabulary)
        self.expert = ActionExpert(
            dims.expert, dims.action_dim, language.num_kv_heads * language.head_dim
        )

    def mark(self, token: int) -> Tensor:
        """Embedding (1, W) of one of an image's tokens."""
        device = self.language.embedding.weight.device
        return self.language.embed(torch.full((1,), token, dtype=torch.int64, device=device))

    def image(self, camera: int, features: Tensor) -> Tensor:
        """Tokens of a camera's image, (N, W) to (1, image length, W): marks, and its features.

        Features are added to the embedding of their token.
        """
        ids, grids = self.dims.image_ids, self.dims.grids(camera)
        parts, begin = [], 0
        for index, (rows, columns) in enumerate(grids):
            small = index == 0 and len(grids) > 1
            cells = features[begin : begin + rows * columns].view(rows, columns, -1)
            cells = cells + self.mark(ids.patch)
            if self.dims.ends_rows(index):
                ends = self.mark(ids.column)[None].expand(rows, -1, -1)
                cells = torch.cat([cells, ends], dim=1)
            first = self.mark(ids.low_start if small else ids.start)
            parts += [first, cells.flatten(0, 1), self.mark(ids.end)]
            begin += rows * columns
        return torch.cat(parts)[None]

    def laid_out(self, text: Tensor, images: list[Tensor]) -> Tensor:
        """Put each camera's (R or 1, length, …) at its place in the text (R, L, …)."""
        parts, start = [], 0
        for image, place in zip(images, self.dims.image_places, strict=True):
            parts += [text[:, start:place]] if place > start else []
            parts.append(image.expand(text.shape[0], *image.shape[1:]))
            start = place
        parts += [text[:, start:]] if start < text.shape[1] else []
        return torch.cat(parts, dim=1)

    def embed_prefix(
        self, image_tokens: Tensor, image_mask: Tensor, tokens: Tensor, token_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Embeddings (R, P, W) float32 and mask (R, P) bool of text with images (V, N, W)."""
        shown = torch.where(image_mask[:, None, None], image_tokens, 0.0)
        cameras = range(self.dims.cameras)
        images = [self.image(camera, shown[camera]) for camera in cameras]
        text = self.language.embed(tokens)
        return self.laid_out(text, images), self.mask(image_mask, token_mask)

    def mask(self, image_mask: Tensor, token_mask: Tensor) -> Tensor:
        """(V,) and (R, L) bool to the mask (R, P) of all tokens."""
        images = [
            image_mask[camera : camera + 1][None].expand(1, self.dims.image_length(camera))
            for camera in range(self.dims.cameras)
        ]
        return self.laid_out(token_mask, images)

    def shown(self, token_mask: Tensor) -> Tensor:
        """Words that the expert sees, (R, L) bool: not the ends of sentences."""
        count = token_mask.long().cumsum(dim=1)
        found, total = token_mask, count[:, -1:]
        if self.dims.hides_first:
            found = torch.logical_and(found, count > 1)
        if self.dims.hidden_end:
            hidden = total - (self.dims.hidden_end - 1)
            found = torch.logical_and(found, torch.logical_or(count < hidden, count > hidden))
        return found

    def attention_mask(self, mask: Tensor) -> Tensor:
        """What each token sees, (R, P, P) bool: what is before it, and images all of all images."""
        length, device = mask.shape[1], mask.device
        text = torch.zeros(1, self.dims.prompt_length, dtype=torch.bool, device=device)
        counts = map(self.dims.image_length, range(self.dims.cameras))
        ones = [torch.ones(1, count, dtype=torch.bool, device=device) for count in counts]
        image = self.laid_out(text, ones)
        causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        among = torch.logical_and(image[:, :, None], image[:, None])
        own = torch.eye(length, dtype=torch.bool, device=device)
        seen = torch.logical_and(torch.logical_or(causal, among), mask[:, None])
        return torch.logical_or(seen, own)

    def layers(self, embeddings: Tensor, mask: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Rotated keys, values (R, kv_heads, P, D) and output (R, P, W) of each layer.

        That of the last, which nothing reads, is its input.
        """
        positions = mask.long().cumsum(dim=1) - 1
        rotation = rotary(positions, self.dims.language.head_dim, self.dims.rope_base)
        seen, found, x = self.attention_mask(mask), [], embeddings
        *earlier, last = self.language.layers
        for block in earlier:
            q, key, value = block.project(x, rotation)
            x = block.combine(x, attend(q, key, value, seen))
            found.append((key, value, x))
        normed = x if self.dims.language.norm_after else last.first_norm(x)
        return [*found, (*last.attention.keys_values(normed, rotation), x)]

    def prefix(
        self, image_tokens: Tensor, image_mask: Tensor, **rows: Tensor
    ) -> Mapping[str, Tensor]:
        """Return `cross_key`, `cross_value` (layers, R, heads, P, D) and `prefix_mask` (R, P)."""
        tokens, token_mask = rows['tokens'], rows['token_mask']
        embeddings, mask = self.embed_prefix(image_tokens, image_mask, tokens, token_mask)
        layers = self.layers(embeddings, mask)
        keys, values = (torch.stack([layer[n] for layer in layers]) for n in (0, 1))
        key, value = self.expert.memory(keys, values)
        shown = self.mask(image_mask, self.shown(token_mask))
        return {'cross_key': key, 'cross_value': value, 'prefix_mask': shown}

    def time_conditioning(self, times: Tensor) -> Tensor:
        return self.expert.time_conditioning(times)

    def velocity(
        self, x: Tensor, past: Mapping[str, Tensor], conditioning: Tensor, **rows: Tensor
    ) -> Tensor:
        """As `FlowNetwork.velocity`; zero in padded action dimensions."""
        real = torch.arange(self.dims.action_dim, device=x.device) < self.dims.real_actions
        memory = past['cross_key'], past['cross_value'], past['prefix_mask']
        found = self.expert(torch.where(real, x, 0.0), *memory, conditioning)
        return torch.where(real, -found, 0.0)


NETWORKS = {'molmoact2': MolmoAct2}
