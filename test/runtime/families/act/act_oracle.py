"""ACT once more, written from LeRobot's layers with PyTorch's own modules and no shared code.

Weights are named as in a checkpoint. Batch norms are batch norms, attention is PyTorch's
`MultiheadAttention` with packed projections, and positions are DETR's loop over a mask.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_runtime.families.act.declaration import ActDims

Weights = Mapping[str, Tensor]


def conv_norm(w: Weights, conv: str, norm: str, x: Tensor, **options: int) -> Tensor:
    x = F.conv2d(x, w[f'{conv}.weight'], **options)
    statistics = (w[f'{norm}.running_mean'], w[f'{norm}.running_var'])
    return F.batch_norm(x, *statistics, w[f'{norm}.weight'], w[f'{norm}.bias'], eps=1e-5)


def residual_block(w: Weights, at: str, x: Tensor, dims: ActDims, stride: int, dilation: int):
    if dims.backbone.bottleneck:
        y = F.relu(conv_norm(w, f'{at}.conv1', f'{at}.bn1', x))
        options = {'stride': stride, 'padding': dilation, 'dilation': dilation}
        y = F.relu(conv_norm(w, f'{at}.conv2', f'{at}.bn2', y, **options))
        y = conv_norm(w, f'{at}.conv3', f'{at}.bn3', y)
    else:
        y = F.relu(conv_norm(w, f'{at}.conv1', f'{at}.bn1', x, stride=stride, padding=1))
        y = conv_norm(w, f'{at}.conv2', f'{at}.bn2', y, padding=1)
    if f'{at}.downsample.0.weight' in w:
        x = conv_norm(w, f'{at}.downsample.0', f'{at}.downsample.1', x, stride=stride)
    return F.relu(x + y)


def feature_map(w: Weights, pixels: Tensor, dims: ActDims) -> Tensor:
    x = F.relu(conv_norm(w, 'backbone.conv1', 'backbone.bn1', pixels, stride=2, padding=3))
    x = F.max_pool2d(x, 3, 2, 1)
    for stage, count in enumerate(dims.backbone.blocks, start=1):
        dilated = stage == 4 and dims.backbone.dilated
        for block in range(count):
            stride = 2 if block == 0 and stage > 1 and not dilated else 1
            dilation = 2 if dilated and block else 1
            x = residual_block(w, f'backbone.layer{stage}.{block}', x, dims, stride, dilation)
    return x


def sine_positions(height: int, width: int, channels: int) -> Tensor:
    code = torch.zeros(height, width, channels)
    half = channels // 2
    for y in range(height):
        for x in range(width):
            for axis, (place, count) in enumerate(((y, height), (x, width))):
                angle = (place + 1) / (count + 1e-6) * 2 * math.pi
                for i in range(half):
                    turned = angle / 10000 ** (2 * (i // 2) / half)
                    value = math.cos(turned) if i % 2 else math.sin(turned)
                    code[y, x, axis * half + i] = value
    return code.flatten(0, 1)


def attention(w: Weights, at: str, heads: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    module = nn.MultiheadAttention(q.shape[-1], heads, batch_first=True)
    state = {name: w[f'{at}.{name}'] for name in module.state_dict()}
    module.load_state_dict(state)
    return module.eval()(q, k, v, need_weights=False)[0]


def linear(w: Weights, at: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f'{at}.weight'], w[f'{at}.bias'])


def norm(w: Weights, at: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f'{at}.weight'], w[f'{at}.bias'])


def mlp(w: Weights, at: str, x: Tensor, dims: ActDims) -> Tensor:
    act = F.relu if dims.activation == 'relu' else F.gelu
    return linear(w, f'{at}.linear2', act(linear(w, f'{at}.linear1', x)))


def sublayer(w: Weights, at: str, x: Tensor, dims: ActDims, compute) -> Tensor:
    """A residual branch with its norm before or after."""
    if dims.pre_norm:
        return x + compute(norm(w, at, x))
    return norm(w, at, x + compute(x))


def actions(w: Weights, pixels: list[Tensor], state: Tensor, dims: ActDims) -> Tensor:
    """Chunks (B, H, A) of images (B, 3, h, w) each and states (B, S)."""
    joints = dims.state_dim - dims.environment_dim
    latent = torch.zeros(len(state), w['encoder_latent_input_proj.weight'].shape[1])
    tokens = [linear(w, 'encoder_latent_input_proj', latent)]
    tokens.append(linear(w, 'encoder_robot_state_input_proj', state[:, :joints]))
    if dims.environment_dim:
        tokens.append(linear(w, 'encoder_env_state_input_proj', state[:, joints:]))
    tokens = [token[:, None] for token in tokens]
    positions = [w['encoder_1d_feature_pos_embed.weight']]
    for image in pixels:
        found = feature_map(w, image, dims)
        projection = w['encoder_img_feat_input_proj.weight'], w['encoder_img_feat_input_proj.bias']
        tokens.append(F.conv2d(found, *projection).flatten(2).transpose(1, 2))
        positions.append(sine_positions(*found.shape[-2:], dims.width))
    x, at = torch.cat(tokens, dim=1), torch.cat(positions)
    heads = dims.encoder.num_heads
    for layer in range(dims.encoder.depth):
        name = f'encoder.layers.{layer}'
        x = sublayer(
            w,
            f'{name}.norm1',
            x,
            dims,
            lambda y, name=name: attention(w, f'{name}.self_attn', heads, y + at, y + at, y),
        )
        x = sublayer(w, f'{name}.norm2', x, dims, lambda y, name=name: mlp(w, name, y, dims))
    memory = norm(w, 'encoder.norm', x) if dims.pre_norm else x
    queries = w['decoder_pos_embed.weight']
    y = torch.zeros(len(state), *queries.shape)
    for layer in range(dims.decoder.depth):
        name = f'decoder.layers.{layer}'
        y = sublayer(
            w,
            f'{name}.norm1',
            y,
            dims,
            lambda z, name=name: attention(
                w, f'{name}.self_attn', heads, z + queries, z + queries, z
            ),
        )
        y = sublayer(
            w,
            f'{name}.norm2',
            y,
            dims,
            lambda z, name=name: attention(
                w, f'{name}.multihead_attn', heads, z + queries, memory + at, memory
            ),
        )
        y = sublayer(w, f'{name}.norm3', y, dims, lambda z, name=name: mlp(w, name, z, dims))
    return linear(w, 'action_head', norm(w, 'decoder.norm', y))


def their_weights(dims: ActDims, seed: int = 0) -> dict[str, Tensor]:
    """Random weights under LeRobot's names, all of which matter."""
    shapes: dict[str, tuple[int, ...]] = {}

    def layer_norm(name: str) -> None:
        shapes.update({f'{name}.weight': (dims.width,), f'{name}.bias': (dims.width,)})

    def dense(name: str, inputs: int, outputs: int) -> None:
        shapes.update({f'{name}.weight': (outputs, inputs), f'{name}.bias': (outputs,)})

    def conv(name: str, inputs: int, outputs: int, kernel: int, bn: str) -> None:
        shapes[f'{name}.weight'] = (outputs, inputs, kernel, kernel)
        for leaf in ('weight', 'bias', 'running_mean', 'running_var'):
            shapes[f'{bn}.{leaf}'] = (outputs,)

    backbone = dims.backbone
    conv('backbone.conv1', 3, backbone.stem, 7, 'backbone.bn1')
    inputs = backbone.stem
    for stage, (inner, count) in enumerate(zip(backbone.channels, backbone.blocks, strict=True), 1):
        outputs = inner * (4 if backbone.bottleneck else 1)
        for block in range(count):
            at = f'backbone.layer{stage}.{block}'
            sizes = [(inputs, inner, 3), (inner, inner, 3)]
            if backbone.bottleneck:
                sizes = [(inputs, inner, 1), (inner, inner, 3), (inner, outputs, 1)]
            for number, size in enumerate(sizes, 1):
                conv(f'{at}.conv{number}', *size, f'{at}.bn{number}')
            strided = block == 0 and stage > 1 and not (stage == 4 and backbone.dilated)
            if strided or inputs != outputs:
                conv(f'{at}.downsample.0', inputs, outputs, 1, f'{at}.downsample.1')
            inputs = outputs
    for stack, depth in (('encoder', dims.encoder.depth), ('decoder', dims.decoder.depth)):
        attentions = ('self_attn', 'multihead_attn') if stack == 'decoder' else ('self_attn',)
        for layer in range(depth):
            at = f'{stack}.layers.{layer}'
            for name in attentions:
                shapes[f'{at}.{name}.in_proj_weight'] = (3 * dims.width, dims.width)
                shapes[f'{at}.{name}.in_proj_bias'] = (3 * dims.width,)
                dense(f'{at}.{name}.out_proj', dims.width, dims.width)
            dense(f'{at}.linear1', dims.width, dims.encoder.mlp_dim)
            dense(f'{at}.linear2', dims.encoder.mlp_dim, dims.width)
            for number in range(1, len(attentions) + 2):
                layer_norm(f'{at}.norm{number}')
        if stack == 'decoder' or dims.pre_norm:
            layer_norm(f'{stack}.norm')
    dense('encoder_latent_input_proj', 5, dims.width)
    dense('encoder_robot_state_input_proj', dims.state_dim - dims.environment_dim, dims.width)
    if dims.environment_dim:
        dense('encoder_env_state_input_proj', dims.environment_dim, dims.width)
    shapes['encoder_img_feat_input_proj.weight'] = (dims.width, inputs, 1, 1)
    shapes['encoder_img_feat_input_proj.bias'] = (dims.width,)
    shapes['encoder_1d_feature_pos_embed.weight'] = (dims.vector_tokens, dims.width)
    shapes['decoder_pos_embed.weight'] = (dims.horizon, dims.width)
    shapes['vae_encoder_cls_embed.weight'] = (1, dims.width)
    dense('action_head', dims.width, dims.action_dim)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        fan_in = math.prod(shape[1:]) if len(shape) > 1 else 4.0
        weights[name] = torch.randn(shape, generator=generator) * fan_in**-0.5
        if name.endswith('running_var'):
            weights[name] = weights[name].abs() + 0.5
        if 'norm' in name and name.endswith('.weight'):
            weights[name] += 1.0
    return weights
