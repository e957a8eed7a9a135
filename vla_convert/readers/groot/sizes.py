"""Sizes that checkpoints of GR00T N1.6 and N1.7 have in common, and settings of their backbones.

Heads, rotary positions and windows of a backbone show in no tensor: they come from its config.json
beside the tokenizer, or from the published model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from vla_convert.checkpoints.folder_facts import CONFIG_FILE, FolderFacts, count_image_places
from vla_convert.checkpoints.missing_facts import MissingFacts
from vla_convert.checkpoints.options import ExportOptions
from vla_convert.checkpoints.reader import MakeDims, Source
from vla_convert.checkpoints.tensors import CheckpointError
from vla_convert.readers.block_sizes import Shapes, checked_dims, decoder_dims
from vla_runtime.families.groot.dimensions import AlternatingDims, StackDims
from vla_runtime.families.groot.n17_dimensions import GROOT_N17
from vla_runtime.files.json_file import JsonMapping, read_json
from vla_runtime.processing.prompts import PromptLayout

# Heads of the published stacks by width: SigLIP So400m, and the two stacks of the action head.
_HEADS = {'vision': {1152: 16}, 'context': {2048: 32}, 'dit': {1536: 32}}
_TENSORS = {
    'vision': ('vision.patch_embedding.weight', 4),
    'context': ('context.0.attention.q.weight', 2),
    'dit': ('dit.0.attention.q.weight', 2),
}


def settle_stack_heads(
    shape: Shapes, parts: Sequence[str], options: ExportOptions, missing: MissingFacts
) -> Mapping[str, int] | None:
    """Heads of each part (`vision`, `context`, `dit`) by published widths, else from the options.

    None once one is noted missing.
    """
    found: dict[str, int] = {}
    for part in parts:
        width = shape(*_TENSORS[part])[0]
        option = '--vision-heads' if part == 'vision' else f'--heads {part}=N'
        given = options.vision_heads if part == 'vision' else options.heads.get(part)
        heads = missing.pick(
            option,
            given,
            _HEADS[part].get(width),
            f"attention heads of '{part}', {width} numbers wide",
        )
        if heads is None:
            continue
        if width % heads:
            missing.conflict(f'{option} says {heads}, which does not divide its width of {width}')
            continue
        found[part] = heads
    return found if len(found) == len(parts) else None


def stack_dims(shape: Shapes, stack: str, heads: int) -> StackDims:
    """Sizes of the stack `context` or `dit`."""
    return StackDims(
        depth=shape.depth(stack),
        num_heads=heads,
        head_dim=shape(f'{stack}.0.attention.q.weight', 2)[0] // heads,
        mlp_dim=shape(f'{stack}.0.mlp.fc1.weight', 2)[0],
    )


# Settings of the backbone that no tensor shows.
Backbone = TypeVar('Backbone')


@dataclass(frozen=True)
class BackboneModel(Generic[Backbone]):
    """Backbone of a version.

    Attributes:
        published: sizes of the published policy; settings: of its backbone.
        patch_axes: axes of the patch embedding's weights; the first is the width.
        wanted: source of the tokenizer, for the user.
    """

    policies: str
    prompt: PromptLayout
    published: AlternatingDims
    settings: Backbone
    patch_axes: int
    stated: Callable[[JsonMapping], Backbone]
    wanted: str


def alternating_sizes(
    source: Source,
    model: BackboneModel[Backbone],
    make: Callable[[Shapes, Backbone, Mapping[str, int], FolderFacts, dict[str, Any]], Any],
) -> MakeDims | None:
    """As `CheckpointReader.sizes`.

    `make` gets shapes, backbone settings, heads of each stack, folder facts and the fields common
    to both versions.
    """
    folder, tensors, facts, options, missing = source
    shape = Shapes(tensors, model.policies)
    tokenizer = options.tokenizer or facts.tokenizer
    backbone = _backbone(shape, model, tokenizer, missing)
    parts = ('context', 'dit') if 'context.0.attention.q.weight' in shape else ('dit',)
    heads = settle_stack_heads(shape, parts, options, missing)
    if tokenizer is None or not tokenizer.is_file() or backbone is None or heads is None:
        return None
    if not facts.image_sizes:
        return None
    text_every = _text_every(folder)

    def sizes(cameras: int, prompt_length: int, horizon: int) -> Any:
        places = count_image_places(tokenizer, model.prompt, cameras, prompt_length)
        (head_dim,) = shape('language.blocks.0.attention.k_norm.weight', 1)
        keys, _ = shape('language.blocks.0.attention.k.weight', 2)
        common = {
            'language': decoder_dims(shape, 'language', max(1, keys // head_dim)),
            'dit': stack_dims(shape, 'dit', heads['dit']),
            'text_every': text_every,
            'head_width': shape('out.weight', 2)[0],
            'positions': shape('positions', 2)[0],
            'vocabulary': shape('language.embedding.weight', 2)[0],
            'cameras': len(places),
            'image_places': places,
            'prompt_length': prompt_length,
            'horizon': horizon,
            'real_horizon': facts.real_horizon or horizon,
            'action_dim': shape('action_encoder.embed.weight', 2)[0],
            'state_dim': shape('state_encoder.fc1.weight', 2)[0],
        }
        return checked_dims(lambda: make(shape, backbone, heads, facts, common))

    return sizes


def _backbone(
    shape: Shapes, model: BackboneModel[Backbone], tokenizer: Path | None, missing: MissingFacts
) -> Backbone | None:
    """Settings from the backbone's config.json, else the published ones; None once asked."""
    beside = None if tokenizer is None else tokenizer.parent / CONFIG_FILE
    if beside is not None and beside.is_file():
        config = read_json(beside)
        if 'vision_config' in config and 'text_config' in config:
            return model.stated(config)
    vision: Any = model.published.vision
    (head_dim,) = shape('language.blocks.0.attention.k_norm.weight', 1)
    width = shape('vision.patch_embedding.weight', model.patch_axes)[0]
    depth = shape.depth('vision.blocks')
    if (width, depth, head_dim) == (vision.width, vision.depth, model.published.language.head_dim):
        return model.settings
    missing.ask('--tokenizer', f'{model.wanted}: the backbone is not the published one')
    return None


def _text_every(folder: Path) -> int:
    """Interval of cross-attention blocks that read text; LeRobot's folders do not give it."""
    config = read_json(folder / CONFIG_FILE)
    if not config.get('use_alternate_vl_dit', bool, True):
        raise CheckpointError(
            f'{folder / CONFIG_FILE}: use_alternate_vl_dit is false; only a DiT whose blocks take '
            'turns between text and images is supported'
        )
    return int(config.count('attend_text_every_n_blocks', GROOT_N17.text_every))


def rope_base(text: JsonMapping) -> float:
    """Base of the rotary positions in a language model's config.json."""
    # transformers 5 calls it rope_parameters and puts the base inside.
    rope = text.mapping('rope_parameters', optional=True)
    return float((rope if 'rope_theta' in rope else text).get('rope_theta', (int, float)))


def whole_numbers(where: JsonMapping, key: str, *default: list[int]) -> list[int]:
    """Read a list of whole numbers (JsonError for anything else)."""
    values: list[int] = where.get(key, list, *default)
    if any(type(value) is not int for value in values):
        raise where.error(key, f'{values} where whole numbers are expected')
    return values
