"""OpenVLA's towers against timm's own, on random weights; skipped where timm is not installed."""

from __future__ import annotations

import pytest
import torch
from network_cases import relative_error

from vla_convert.readers.openvla import NAMES
from vla_runtime.families.blocks.dimensions import VisionDims
from vla_runtime.families.openvla.networks import Tower

timm = pytest.importorskip('timm', reason='timm is not installed: pip install timm torchvision')
TOLERANCE = 2e-5
# As OpenVLA makes them, at small widths.
TOWERS = {
    'featurizer': {
        'class_token': True,
        'reg_tokens': 4,
        'no_embed_class': True,
        'init_values': 1e-5,
        'global_pool': 'token',
        'mlp_ratio': 4,
    },
    'fused_featurizer': {'class_token': False, 'global_pool': 'map', 'mlp_ratio': 3.7362},
}


@pytest.mark.parametrize('name', TOWERS)
@pytest.mark.parametrize(('edge', 'width', 'heads', 'depth'), [(112, 32, 4, 3), (98, 48, 6, 5)])
def test_features_are_those_of_the_block_before_the_last(name, edge, width, heads, depth):
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    theirs = VisionTransformer(
        img_size=edge,
        patch_size=14,
        embed_dim=width,
        depth=depth,
        num_heads=heads,
        num_classes=0,
        **TOWERS[name],
    ).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    dims = VisionDims(
        width=width,
        depth=depth - 1,
        num_heads=heads,
        mlp_dim=int(width * TOWERS[name]['mlp_ratio']),
        patch_size=14,
        image_size=edge,
    )
    ours = Tower(dims, TOWERS[name].get('reg_tokens')).eval()
    part = 'vision.dino.' if name == 'featurizer' else 'vision.siglip.'
    weights = {}
    for key, tensor in theirs.state_dict().items():
        published = f'vision_backbone.{name}.{key}'
        names = NAMES.parts(published)
        if not NAMES.is_unused(published):
            weights |= dict(zip(names, tensor.chunk(len(names)), strict=True))
    own = {key.removeprefix(part): tensor for key, tensor in weights.items()}
    last = f'blocks.{depth - 1}.'
    ours.load_state_dict({key: t for key, t in own.items() if not key.startswith(last)})
    pixels = torch.randn(2, 3, edge, edge)
    with torch.inference_mode():
        (expected,) = theirs.get_intermediate_layers(pixels, n={depth - 2})
        assert relative_error(ours(pixels), expected) <= TOLERANCE
