"""BitVLA."""

from __future__ import annotations

from pathlib import Path

from bitvla_cases import load_bitvla_case

from family_contracts.declaration import Case, FamilyContract
from family_contracts.robot import CAMERAS, places_of
from vla_runtime.bundle.schema import CropSpec, ImageSpec
from vla_runtime.families.bitvla.dimensions import BitVlaDims
from vla_runtime.families.blocks.dimensions import DecoderDims, VisionDims

TOKENIZER = 'bitvla_tokenizer.json'


def tiny(horizon: int) -> BitVlaDims:
    places = places_of('bitvla', TOKENIZER)
    return BitVlaDims(
        vision=VisionDims(width=24, depth=1, num_heads=2, mlp_dim=32, patch_size=7, image_size=28),
        language=DecoderDims(
            width=40, depth=2, mlp_dim=48, num_heads=4, num_kv_heads=2, head_dim=10
        ),
        vocabulary=264,
        cameras=len(CAMERAS),
        image_places=places,
        state_place=places[-1],
        prompt_length=places[-1] + 160,
        stop_token=257,
        horizon=horizon,
        action_dim=6,
        state_dim=5,
        head_width=36,
    )


def case(path: Path, b: int) -> Case:
    """Ternary layers are compared from their recorded codes in test/families/bitvla."""
    found = load_bitvla_case(path)
    return Case(
        network=found.network,
        steps=1,
        pixels=found.tensors[f'pixel_values_{b}'],
        image_mask=found.visible(),
        rows=found.rows(b),
        actions=found.tensors[f'normalized_actions_{b}'],
        image_tokens=list(found.tensors[f'image_features_{b}']),
        past={
            'action_features': found.tensors[f'action_hidden_{b}'].view(
                1, found.network.dims.horizon, -1
            )
        },
    )


CONTRACTS = (
    FamilyContract(
        family='bitvla',
        tiny=tiny,
        case=case,
        template='bitvla',
        tokenizer=TOKENIZER,
        images=ImageSpec('crop', 'lanczos', CropSpec(28, 0.9)),
        norms_pass=True,
    ),
)
