"""Make a folder of one LeRobot release and the chunks of that release's own policy.

Run in an environment that has the release (`pip install --no-deps lerobot==RELEASE` and what its
policies import) and, for pi0 and pi0.5 before 0.5, its transformers:

    python make_release.py RELEASE TYPE FOLDER [BASE]

With BASE, a folder that this script made, FOLDER becomes an adapter (LoRA, by PEFT) of its policy.

The policy is the release's own class with small sizes and made-up weights, in float32. The release
saves it, loads it again, and makes the chunks with its own processing.
"""

from __future__ import annotations

import importlib
import json
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import transformers
from made_weights import made_picture, made_tensor, uniform
from safetensors.numpy import load_file, save_file

CASES = Path(__file__).parents[1] / 'cases'
TOKENIZERS = {
    'pi0': ('lerobot_pi05_tiny', {'pad_token': '<pad>', 'bos_token': '<bos>'}),
    'pi05': ('lerobot_pi05_tiny', {'pad_token': '<pad>', 'bos_token': '<bos>'}),
    'smolvla': ('smolvla_folder', {'pad_token': '<|im_end|>'}),
}
JOINTS = 6
CAMERAS = {'top': (48, 80), 'wrist': (64, 48)}
ACT_CAMERAS = {'cam_high': (48, 80), 'cam_left_wrist': (48, 80)}
TASKS = ('pick up the red_cup', 'push the green block - gently\n', 'fold it')
HORIZON = 8


def before(release: str, other: str) -> bool:
    """Return whether a release is older than another."""
    return [int(n) for n in release.split('.')] < [int(n) for n in other.split('.')]


def module(release: str, policy: str, kind: str):
    return importlib.import_module(f'lerobot.policies.{policy}.{kind}_{policy}')


def statistics(cameras) -> dict[str, dict[str, np.ndarray]]:
    """Statistics of a data set, states where their actions are."""
    mean = 0.8 * uniform('mean', JOINTS)
    stats = {}
    for feature in ('observation.state', 'action'):
        spread = 0.4 + 0.3 * np.abs(uniform(feature, JOINTS))
        stats[feature] = {
            'mean': mean,
            'std': spread,
            'min': mean - 3 * spread,
            'max': mean + 3 * spread,
            'q01': mean - 2 * spread,
            'q99': mean + 2 * spread,
        }
    for camera in cameras:
        centre = 0.5 + 0.1 * uniform(camera, 3)
        stats[f'observation.images.{camera}'] = {
            'mean': centre.reshape(3, 1, 1),
            'std': np.full((3, 1, 1), 0.25) + 0.01 * centre.reshape(3, 1, 1),
            'min': np.zeros((3, 1, 1)),
            'max': np.ones((3, 1, 1)),
            'q01': np.full((3, 1, 1), 0.02),
            'q99': np.full((3, 1, 1), 0.98),
        }
    return {
        feature: {name: values.astype(np.float32) for name, values in group.items()}
        for feature, group in stats.items()
    }


def use_small_networks(release: str, policy: str) -> None:
    """Make the release build its networks small, and find its tokenizer here."""
    if policy in TOKENIZERS:
        folder, words = TOKENIZERS[policy]
        path = str(CASES / folder / 'tokenizer.json')

        def tokenizer(*_, **__):
            found = transformers.PreTrainedTokenizerFast(tokenizer_file=path, **words)
            for name in ('fake_image_token_id', 'global_image_token_id'):
                with suppress(Exception):
                    setattr(found, name, 1)
            return found

        transformers.AutoTokenizer.from_pretrained = tokenizer
        transformers.AutoProcessor.from_pretrained = lambda *_, **__: SimpleNamespace(
            tokenizer=tokenizer()
        )
    if policy == 'smolvla':
        small = transformers.SmolVLMConfig(
            text_config={
                'model_type': 'llama',
                'hidden_size': 64,
                'intermediate_size': 96,
                'num_hidden_layers': 4,
                'num_attention_heads': 4,
                'num_key_value_heads': 2,
                'head_dim': 16,
                'vocab_size': 360,
                'rms_norm_eps': 1e-5,
                'pad_token_id': 2,
            },
            vision_config={
                'hidden_size': 32,
                'intermediate_size': 48,
                'num_hidden_layers': 2,
                'num_attention_heads': 4,
                'patch_size': 8,
                'image_size': 64,
            },
            scale_factor=2,
            image_token_id=359,
        )
        transformers.AutoConfig.from_pretrained = lambda *_, **__: small
    if policy == 'act':
        use_small_resnet()
    if policy in ('pi0', 'pi05'):
        if before(release, '0.4.0'):
            use_small_early_pi0()
        else:
            use_small_paligemma(module(release, policy, 'modeling'))


def use_small_paligemma(modeling) -> None:
    language = {'width': 64, 'depth': 2, 'mlp_dim': 96, 'num_heads': 8, 'num_kv_heads': 1}
    expert = {**language, 'width': 32, 'mlp_dim': 64}
    modeling.get_gemma_config = lambda variant: modeling.GemmaConfig(
        **(language if variant == 'gemma_2b' else expert), head_dim=16
    )

    def small(cls):
        def make(config):
            text = getattr(config, 'text_config', config)
            text.vocab_size = 400
            if text is not config:
                config._vocab_size = 400
                config.image_token_id = config.image_token_index = 399
                vision = config.vision_config
                vision.hidden_size, vision.num_hidden_layers = 32, 2
                vision.num_attention_heads, vision.intermediate_size = 4, 48
                vision.patch_size, vision.image_size = 14, 56
                vision.projection_dim = config.projection_dim = config.hidden_size = 64
            return cls(config=config)

        return lambda config: make(config)

    for name in (
        'PaliGemmaForConditionalGeneration',
        'GemmaForCausalLM',
        'PaliGemmaForConditionalGenerationWithPiGemma',
        'PiGemmaForCausalLM',
    ):
        if hasattr(modeling, name):
            setattr(modeling, name, small(getattr(modeling, name)))


def use_small_early_pi0() -> None:
    """LeRobot before 0.4: the sizes are the default of a configuration, numbers are bfloat16."""
    parts = importlib.import_module('lerobot.policies.pi0.paligemma_with_expert')
    text = {
        'model_type': 'gemma',
        'hidden_activation': 'gelu_pytorch_tanh',
        'hidden_size': 64,
        'intermediate_size': 96,
        'num_attention_heads': 8,
        'num_hidden_layers': 2,
        'num_key_value_heads': 1,
        'head_dim': 16,
        'vocab_size': 400,
    }
    vision = {
        'model_type': 'siglip_vision_model',
        'hidden_size': 32,
        'intermediate_size': 48,
        'num_attention_heads': 4,
        'num_hidden_layers': 2,
        'patch_size': 14,
        'image_size': 56,
        'projection_dim': 64,
        'vision_use_head': False,
    }
    original = parts.PaliGemmaWithExpertConfig.__init__

    def make(self, paligemma_config=None, gemma_expert_config=None, **rest):
        original(self, None, None, **rest)
        mapping = parts.CONFIG_MAPPING
        self.paligemma_config = mapping['paligemma'](
            hidden_size=64,
            projection_dim=64,
            image_token_index=399,
            pad_token_id=0,
            text_config=text,
            vision_config=vision,
        )
        self.gemma_expert_config = mapping['gemma'](
            **{**text, 'hidden_size': 32, 'intermediate_size': 64, 'pad_token_id': 0}
        )

    parts.PaliGemmaWithExpertConfig.__init__ = make
    # Its casts are written all over the code; in float32 they are none.
    torch.bfloat16 = torch.float32


def use_small_resnet() -> None:
    import torchvision

    def small(original):
        def make(*_, norm_layer, replace_stride_with_dilation, **__):
            net = original(
                weights=None,
                norm_layer=norm_layer,
                replace_stride_with_dilation=replace_stride_with_dilation,
            )
            for parent in net.modules():
                for name, part in list(parent.named_children()):
                    if isinstance(part, torch.nn.Conv2d):
                        channels = (
                            part.in_channels if part.in_channels == 3 else part.in_channels // 8
                        )
                        setattr(
                            parent,
                            name,
                            torch.nn.Conv2d(
                                channels,
                                part.out_channels // 8,
                                part.kernel_size,
                                part.stride,
                                part.padding,
                                part.dilation,
                                bias=False,
                            ),
                        )
                    elif isinstance(part, norm_layer):
                        setattr(parent, name, norm_layer(part.weight.shape[0] // 8))
            net.fc = torch.nn.Linear(64, 10)
            return net

        return make

    torchvision.models.resnet18 = small(torchvision.models.resnet18)


def make_config(release: str, policy: str, cameras):
    types = importlib.import_module('lerobot.configs.types')
    features = {
        f'observation.images.{name}': types.PolicyFeature(types.FeatureType.VISUAL, (3, *size))
        for name, size in cameras.items()
    }
    features['observation.state'] = types.PolicyFeature(types.FeatureType.STATE, (JOINTS,))
    outputs = {'action': types.PolicyFeature(types.FeatureType.ACTION, (JOINTS,))}
    own = {
        'act': {'dim_model': 32, 'n_heads': 4, 'dim_feedforward': 48, 'n_encoder_layers': 2},
        'smolvla': {
            'resize_imgs_with_padding': (64, 64),
            'num_vlm_layers': 4,
            'load_vlm_weights': False,
        },
        'pi0': {'image_resolution': (56, 56), 'dtype': 'float32'},
        'pi05': {'image_resolution': (56, 56), 'dtype': 'float32'},
    }[policy]
    if policy == 'act':
        own |= {'n_vae_encoder_layers': 1, 'latent_dim': 8, 'pretrained_backbone_weights': None}
    if policy == 'pi0' and before(release, '0.4.0'):
        own = {'resize_imgs_with_padding': (56, 56), 'proj_width': 32}
    cls = {'act': 'ACTConfig', 'smolvla': 'SmolVLAConfig', 'pi0': 'PI0Config', 'pi05': 'PI05Config'}
    return getattr(module(release, policy, 'configuration'), cls[policy])(
        input_features=features,
        output_features=outputs,
        chunk_size=HORIZON,
        n_action_steps=HORIZON,
        device='cpu',
        push_to_hub=False,
        **own,
    )


def add_adapter(policy, folder: Path, base: str):
    """Save an adapter of a policy, with made-up weights, and return the policy with it."""
    from peft import LoraConfig, PeftModel, get_peft_model

    layers = (
        r'.*gemma_expert.*self_attn\.(q|v)_proj|.*language_model.*mlp\.up_proj|.*action_in_proj'
    )
    config = LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=layers,
        alpha_pattern={'action_in_proj': 2},
        modules_to_save=['action_out_proj'],
    )
    made = get_peft_model(policy, config)
    made.save_pretrained(folder)
    refill(folder, 'adapter_model.safetensors')
    written = folder / 'adapter_config.json'
    values = json.loads(written.read_text()) | {'base_model_name_or_path': f'someone/{base}'}
    written.write_text(json.dumps(values, indent=1))
    policy.config.use_peft = True
    policy.config.save_pretrained(folder)
    return PeftModel.from_pretrained(made.unload(), folder).base_model.model.eval()


def refill(folder: Path, file: str = 'model.safetensors') -> None:
    """Write made-up weights into the saved file; statistics among them stay."""
    path = folder / file
    tensors = load_file(path)
    shapes = {}
    for name, values in tensors.items():
        if 'normalize_' in name:
            continue
        tensors[name] = made_tensor(name, values.shape)
        shapes[name] = list(values.shape)
    save_file(tensors, path)
    (folder / 'tensors.json').write_text(json.dumps(shapes, indent=0))
    early = {name: values for name, values in tensors.items() if 'normalize_' in name}
    if early:
        save_file(early, folder / 'statistics.safetensors')


@torch.no_grad()
def main(release: str, policy: str, target: str, base: str | None = None) -> None:
    folder = Path(target)
    cameras = ACT_CAMERAS if policy == 'act' else CAMERAS
    use_small_networks(release, policy)
    modeling = module(release, policy, 'modeling')
    cls = {'act': 'ACTPolicy', 'smolvla': 'SmolVLAPolicy', 'pi0': 'PI0Policy', 'pi05': 'PI05Policy'}
    cls = getattr(modeling, cls[policy])
    config = make_config(release, policy, cameras)
    stats = {
        feature: {name: torch.from_numpy(values) for name, values in group.items()}
        for feature, group in statistics(cameras).items()
    }
    early = before(release, '0.4.0')
    made = cls(config, dataset_stats=stats) if early else cls(config)
    made.float().save_pretrained(folder)
    refill(folder)
    before_step = after_step = None
    if not early:
        maker = getattr(module(release, policy, 'processor'), f'make_{policy}_pre_post_processors')
        before_step, after_step = maker(config, dataset_stats=stats)
        before_step.save_pretrained(folder)
        after_step.save_pretrained(folder)
    loaded = cls.from_pretrained(folder).float().eval()
    loaded.config.device = 'cpu'
    if base is not None:
        loaded = add_adapter(loaded, folder, Path(base).name)
    noise = uniform('noise', HORIZON * 32).reshape(1, HORIZON, 32).astype(np.float32) * 1.7
    if policy != 'act':
        # A copy: early releases add to it in place.
        loaded.model.sample_noise = lambda *_: torch.from_numpy(noise.copy())
    tensors = {'noise': noise[0]}
    mean = statistics(cameras)['observation.state']['mean']
    for index, task in enumerate(TASKS):
        state = mean + 0.5 * uniform(f'state {index}', JOINTS).astype(np.float32)
        batch = {'observation.state': torch.from_numpy(state), 'task': task}
        for name, (height, width) in cameras.items():
            picture = made_picture(f'{name} {index}', height, width)
            batch[f'observation.images.{name}'] = (
                torch.from_numpy(picture).permute(2, 0, 1).float() / 255
            )
        loaded.reset()
        if early:
            batch = {key: [value] if key == 'task' else value[None] for key, value in batch.items()}
            if policy == 'pi0':
                chunk = torch.stack([loaded.select_action(dict(batch)) for _ in range(HORIZON)], 1)
            else:
                chunk = loaded.predict_action_chunk(batch)
        else:
            chunk = after_step(loaded.predict_action_chunk(before_step(batch)))
        tensors[f'state_{index}'] = state
        tensors[f'chunk_{index}'] = np.ascontiguousarray(chunk[0].numpy())
    save_file(tensors, folder / 'chunks.safetensors')
    description = {
        'lerobot': release,
        'type': policy,
        'transformers': transformers.__version__,
        'torch': torch.__version__,
        'cameras': {name: list(size) for name, size in cameras.items()},
        'tasks': list(TASKS),
        **({} if base is None else {'adapter_of': Path(base).name}),
    }
    (folder / 'description.json').write_text(json.dumps(description, indent=1))
    for name in ('model.safetensors', 'adapter_model.safetensors', 'README.md'):
        (folder / name).unlink(missing_ok=True)
    print(release, policy, tensors['chunk_0'][0], np.abs(tensors['chunk_0']).max())


if __name__ == '__main__':
    main(*sys.argv[1:])
