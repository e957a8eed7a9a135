"""MolmoAct2 (Ai2, LeRobot 0.6): a Molmo vision-language model whose keys an expert reads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from vla_runtime.family.declaration import Family, no_inputs, prompt_inputs
from vla_runtime.family.dimensions import (
    DecoderDims,
    Part,
    Share,
    Shown,
    TensorShapes,
    check_heads,
    check_language,
    check_places,
    check_positive,
    depth_of,
    size,
)
from vla_runtime.family.flow_time import layer_rows, silu
from vla_runtime.files.safetensors_reader import SafetensorsReader
from vla_runtime.processing.prompts import PromptLayout
from vla_runtime.processing.tiles import Tiling

# --------------------------------------------------------------------------------------------------
# The sizes of MolmoAct2, a preset for the published model. Pure numbers.


def _root(tensor: str, axis: int, channels: int = 1) -> Shown:
    def read(shape: TensorShapes) -> int:
        length = shape(tensor, 2)[axis]
        edge = math.isqrt(length // channels)
        if edge * edge * channels != length:
            raise ValueError(f'{tensor} has {length} numbers where those of a square are expected')
        return edge

    return Shown(read)


@dataclass(frozen=True)
class TowerDims:
    """A vision transformer over the crops of an image.

    Attributes:
        positions: edge of the square table of positions, which is resized to that of the patches.
        image_size: edge of a crop in pixels.
        layers: blocks, counted from 1, whose outputs are read, side by side in this order.
    """

    width: Annotated[int, size('patch_embedding.weight')]
    depth: Annotated[int, depth_of('blocks')]
    num_heads: Annotated[int, Share('blocks.0.attention.q.weight', among='head_dim')]
    num_kv_heads: int
    head_dim: Annotated[int, Share('blocks.0.attention.k.weight', among='num_kv_heads')]
    mlp_dim: Annotated[int, size('blocks.0.mlp.fc1.weight')]
    patch_size: Annotated[int, _root('patch_embedding.weight', 1, 3)]
    positions: Annotated[int, _root('position_embedding', 0)]
    image_size: int
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.image_size % self.patch_size:
            raise ValueError(
                f'vision.image_size {self.image_size} is not a multiple of patch_size '
                f'{self.patch_size}'
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f'vision.num_heads {self.num_heads} is not a multiple of num_kv_heads '
                f'{self.num_kv_heads}'
            )
        if not self.layers or not all(1 <= one <= self.depth for one in self.layers):
            raise ValueError(
                f'vision.layers {list(self.layers)} where numbers of blocks, from 1 to '
                f'{self.depth}, are expected'
            )

    @property
    def grid(self) -> int:
        """Patches along an edge of a crop."""
        return self.image_size // self.patch_size


@dataclass(frozen=True)
class PoolingDims:
    """Attention of the mean of a window of patches to its patches: one image token each.

    Attributes:
        window: (height, width) in patches.
        masked: patches of a window that lie outside of the image are not seen; else they are zeros.
        mlp_dim: hidden numbers of the projector behind it.
    """

    width: Annotated[int, size('pooling.out.weight')]
    num_heads: Annotated[int, Share('pooling.q.weight', among='head_dim')]
    num_kv_heads: int
    head_dim: Annotated[int, Share('pooling.k.weight', among='num_kv_heads')]
    mlp_dim: Annotated[int, size('projector.gate.weight')]
    window: tuple[int, int]
    masked: bool = True

    def __post_init__(self) -> None:
        if min(self.window) < 1:
            raise ValueError(f'pooling.window {self.window} where at least 1 is expected')
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f'pooling.num_heads {self.num_heads} is not a multiple of num_kv_heads '
                f'{self.num_kv_heads}'
            )


@dataclass(frozen=True)
class ActionExpertDims:
    """The expert: self-attention, attention to the language model's keys, a gated MLP.

    Attributes:
        context_norm: keys and values of the language model are normed over all heads.
        head_norm: queries and keys of each head are normed.
    """

    width: Annotated[int, size('action_in.weight')]
    depth: Annotated[int, depth_of('blocks')]
    num_heads: int
    mlp_dim: Annotated[int, size('blocks.0.mlp.gate.weight')]
    time_width: Annotated[int, size('time_in.weight', axis=1)]
    context_norm: bool = True
    head_norm: bool = True

    def __post_init__(self) -> None:
        check_heads('expert', self)
        if self.time_width % 2 or self.width // self.num_heads % 2:
            raise ValueError(
                f'expert.time_width {self.time_width} and the {self.width // self.num_heads} '
                'numbers of a head must be even'
            )


@dataclass(frozen=True)
class ImageIds:
    """Tokens of an image: each patch window, its start and end, the end of a row.

    `low_start` begins the whole image in small, where tiles of it follow.
    """

    patch: int
    start: int
    end: int
    column: int
    low_start: int


def _has_bias(shape: TensorShapes) -> bool:
    return 'blocks.0.attention.q.bias' in shape


@dataclass(frozen=True)
class LanguageDims(DecoderDims):
    """A Qwen3-like decoder.

    Attributes:
        head_norm: norm of queries and keys: of each head, of all heads together, or none.
        norm_after: norms stand behind attention and MLP, not before.
        bias: queries, keys and values have one.
    """

    head_norm: Literal['each', 'together', 'none'] = 'each'
    norm_after: bool = False
    bias: Annotated[bool, Shown(_has_bias)] = False


@dataclass(frozen=True)
class MolmoAct2Dims:
    """All that fixes the shapes of a MolmoAct2 policy.

    Attributes:
        image_places: text tokens before each camera's image.
        tilings: (rows, columns) of tiles of each camera's image, behind the whole image in small;
            None: the whole image alone.
        most_tiles: tiles that a camera's image may have.
        margins: patches at the beginning and end of a tile that its neighbour has.
        columns, low_columns: a token ends each row of image tokens, of tiles and of whole images.
        hides_first: the expert does not see the first token of a prompt.
        hidden_end: token of a prompt's text that it does not see, counted from the end; 0: none.
        real_actions: action dimensions that are not padding; they come first.
    """

    vision: TowerDims
    pooling: Annotated[PoolingDims, Part('vision.')]
    language: LanguageDims
    expert: ActionExpertDims
    vocabulary: Annotated[int, size('language.embedding.weight')]
    cameras: int
    image_places: tuple[int, ...]
    image_ids: ImageIds
    prompt_length: int
    horizon: int
    action_dim: Annotated[int, size('expert.action_in.weight', axis=1, stated='action dimensions')]
    real_actions: int
    state_dim: int = 0
    tilings: tuple[tuple[int, int], ...] | None = None
    most_tiles: int = 1
    margins: tuple[int, int] = (1, 1)
    columns: bool = True
    low_columns: bool = False
    hides_first: bool = False
    hidden_end: int = 0
    rope_base: float = 5e6
    rms_epsilon: float = 1e-6

    def __post_init__(self) -> None:
        check_language(self.language)
        check_positive(self, 'rope_base', 'rms_epsilon')
        check_places(self.image_places, self.cameras, self.prompt_length)
        if not self.image_places[0]:
            raise ValueError(
                'image_places begins with 0; the prompt must begin with a token that is always seen'
            )
        if self.expert.depth != self.language.depth:
            raise ValueError(
                f'expert.depth {self.expert.depth} where that of the language model, '
                f'{self.language.depth}, is expected: each of its layers has one block'
            )
        if not 0 < self.real_actions <= self.action_dim:
            raise ValueError(
                f'real_actions {self.real_actions} where 1 to {self.action_dim} (action_dim) is '
                'expected'
            )
        if self.tilings is not None:
            if len(self.tilings) != self.cameras:
                raise ValueError(
                    f'tilings has {len(self.tilings)} entries where one for each of the '
                    f'{self.cameras} cameras is expected'
                )
            if any(min(one) < 1 or math.prod(one) > self.most_tiles for one in self.tilings):
                raise ValueError(
                    f'tilings {list(self.tilings)} where rows and columns of 1 to '
                    f'{self.most_tiles} tiles (most_tiles) are expected'
                )
            if min(self.margins) < 1 or sum(self.margins) >= self.vision.grid:
                raise ValueError(
                    f'margins {self.margins} where 1 or more each, together less than the '
                    f"{self.vision.grid} patches of a tile's edge, are expected"
                )

    @property
    def tiles(self) -> tuple[Tiling, ...] | None:
        """Tilings of the cameras' images, as they are cut (`declaration.image_tiles`)."""
        if self.tilings is None:
            return None
        overlap = sum(self.margins) * self.vision.patch_size
        return tuple(Tiling(*one, overlap, self.most_tiles) for one in self.tilings)

    @property
    def image_sizes(self) -> tuple[tuple[int, int], ...]:
        """Of what the network gets: an image in small, its tiles on the right of it."""
        edge = self.vision.image_size
        if self.tilings is None:
            return ((edge, edge),) * self.cameras
        return tuple((rows * edge, (1 + columns) * edge) for rows, columns in self.tilings)

    def grids(self, camera: int) -> list[tuple[int, int]]:
        """Rows and columns of image tokens: of the whole image, then of its tiles."""
        grid, (high, wide) = self.vision.grid, self.pooling.window
        sides = [(grid, grid)]
        if self.tilings is not None:
            inner, margin = grid - sum(self.margins), sum(self.margins)
            rows, columns = self.tilings[camera]
            sides.append((rows * inner + margin, columns * inner + margin))
        return [(-(-tall // high), -(-across // wide)) for tall, across in sides]

    def ends_rows(self, grid: int) -> bool:
        """Whether a token ends each row of the whole image (0) or of its tiles (1)."""
        return self.columns if grid else self.low_columns

    def image_length(self, camera: int) -> int:
        """Tokens of a camera's image, those of starts, ends and rows among them."""
        grids = self.grids(camera)
        return sum(
            2 + rows * (columns + self.ends_rows(index))
            for index, (rows, columns) in enumerate(grids)
        )

    @property
    def prefix_length(self) -> int:
        """P, tokens that the language model reads: of all images, and text."""
        return sum(map(self.image_length, range(self.cameras))) + self.prompt_length


# The published size (allenai/MolmoAct2 on Qwen3-4B), with two cameras.
MOLMOACT2 = MolmoAct2Dims(
    vision=TowerDims(
        width=1152,
        depth=25,
        num_heads=16,
        num_kv_heads=16,
        head_dim=72,
        mlp_dim=4304,
        patch_size=14,
        positions=27,
        image_size=378,
        layers=(25, 19),
    ),
    pooling=PoolingDims(
        width=1152, num_heads=16, num_kv_heads=16, head_dim=72, mlp_dim=9728, window=(2, 2)
    ),
    language=LanguageDims(
        width=2560, depth=36, mlp_dim=9728, num_heads=32, num_kv_heads=8, head_dim=128
    ),
    expert=ActionExpertDims(width=768, depth=36, num_heads=8, mlp_dim=3072, time_width=256),
    vocabulary=152064,
    cameras=2,
    image_places=(3, 6),
    image_ids=ImageIds(patch=151938, start=151936, end=151937, column=151939, low_start=151940),
    prompt_length=180,
    horizon=30,
    action_dim=32,
    real_actions=6,
    hides_first=True,
    hidden_end=6,
)


# --------------------------------------------------------------------------------------------------
# The flow time of MolmoAct2's expert, in numpy. Its time runs from 0 (noise) to 1.

WAVELENGTHS = 10000.0


def time_code(passed: np.ndarray, width: int) -> np.ndarray:
    """Sines, then cosines of times (N,) from 0 (noise) to 1, (N, width) float32."""
    half = width // 2
    places = np.arange(half, dtype=np.float32) * np.float32(-math.log(WAVELENGTHS))
    angles = passed.astype(np.float32)[:, None] * np.exp(places / np.float32(max(half - 1, 1)))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


class ModulationTable:
    """Rows of `MolmoAct2.time_conditioning`: modulations of all blocks, then of the last layer."""

    def __init__(self, dims: MolmoAct2Dims, weights: SafetensorsReader) -> None:
        self._dims, self._weights = dims.expert, weights
        blocks = range(dims.expert.depth)
        self._names = [f'expert.blocks.{block}.modulation' for block in blocks]
        self._names.append('expert.out_modulation')

    @property
    def width(self) -> int:
        return self._dims.width * (9 * self._dims.depth + 2)

    def __call__(self, times: np.ndarray) -> np.ndarray:
        passed = np.float32(1.0) - np.asarray(times, np.float32)
        code, weights = time_code(passed, self._dims.time_width), self._weights
        hidden = silu(layer_rows(code, weights, 'expert.time_in'))
        embedded = silu(layer_rows(hidden, weights, 'expert.time_out'))
        rows = [layer_rows(embedded, weights, name) for name in self._names]
        return np.concatenate(rows, axis=1)


# --------------------------------------------------------------------------------------------------

# Ends what a user and the policy say.
END = '<|im_end|>'
_TEXT = (
    '{bos}{images}<|im_start|>user\nThe task is to {task}. The setup is {setup}. The current state '
    'of the robot is <state_start>{state}<state_end>. The expected control mode is {control}. '
    'Given these, what action should the robot take to complete the task?<|im_end|>\n'
    '<|im_start|>assistant\n<action_output>'
)


PROMPT = PromptLayout(
    _TEXT,
    image='Image {number}{tokens}',
    alone='{tokens}',
    bos=False,
    special=('<|im_start|>', '<|im_end|>', '<state_start>', '<state_end>', '<action_output>'),
    lerobot_task='clause',
    state_token='<state_{}>',
    words={'bos': END, 'setup': '', 'control': ''},
)

FAMILIES = (
    Family(
        name='molmoact2',
        title='MolmoAct2 (Ai2, LeRobot)',
        head='flow',
        dims=MolmoAct2Dims,
        presets={'molmoact2': MOLMOACT2},
        templates={'setup_and_state': PROMPT},
        prefix_inputs=prompt_inputs,
        head_inputs=no_inputs,
        time_table=ModulationTable,
    ),
)
