"""LeRobot's side of `lerobot_turns.py`, run by the Python that LeRobot is installed in.

    lerobot_worker.py check OPTIONS
        say in one line why PyTorch cannot run on the device
    lerobot_worker.py make OPTIONS
        write a folder of random weights
    lerobot_worker.py serve OPTIONS
        load it and infer, one JSON line a request

OPTIONS is a JSON object, the fields of `Options`. Imports LeRobot, PyTorch, numpy and the standard
library alone. A request names a file of arrays (images, state, noise); the answer gives the time
of one inference and the file of its chunk. The time is that of everything between the camera's
bytes and the chunk in the robot's units, both in the host's memory: LeRobot's own preparation,
processors and policy class.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

TASK = 'put the cup on the shelf'
# As published: lerobot/smolvla_base reads three cameras, ALOHA's ACT and PushT's
# Diffusion Policy one.
CAMERAS = {
    'act': 1,
    'smolvla': 3,
    'pi05': 3,
    'diffusion': 1,
    **dict.fromkeys(('xvla', 'molmoact2', 'vla_jepa'), 2),
}
JOINTS = {**dict.fromkeys(CAMERAS, 7), 'act': 14, 'smolvla': 6, 'diffusion': 2}
# (height, width) of the images.
SIZES = {**dict.fromkeys(CAMERAS, (480, 640)), 'diffusion': (96, 96)}
# Steps of an observation; what is of `ago` steps before the newest has `_<ago>_steps_ago` behind
# its name.
HISTORY = {**dict.fromkeys(CAMERAS, 1), 'diffusion': 2}
# What LeRobot's classes of each are called.
NAMES = {
    'act': 'ACT',
    'smolvla': 'SmolVLA',
    'pi05': 'PI05',
    'diffusion': 'Diffusion',
    'xvla': 'XVLA',
    'molmoact2': 'MolmoAct2',
    'vla_jepa': 'VLAJEPA',
}
# They draw their own noise, whatever they are given.
OWN_NOISE = ('xvla', 'molmoact2', 'vla_jepa')
# The setting that says in what LeRobot computes; it has none of the others.
PRECISION = {'pi05': 'dtype', 'molmoact2': 'model_dtype', 'vla_jepa': 'torch_dtype'}
# DDIM draws no noise of its own, so that two sides can have the same.
DIFFUSION = {
    'crop_shape': (84, 84),
    'noise_scheduler_type': 'DDIM',
    'num_inference_steps': 10,
    'pretrained_backbone_weights': None,
}
# HuggingFaceTB/SmolVLM2-500M-Video-Instruct; its language model has 32 layers, of which the
# policy keeps 16.
SMOLVLM2 = {
    'scale_factor': 4,
    'image_token_id': 49190,
    'pad_token_id': 2,
    'text_config': {
        'model_type': 'llama',
        'hidden_size': 960,
        'intermediate_size': 2560,
        'num_hidden_layers': 16,
        'num_attention_heads': 15,
        'num_key_value_heads': 5,
        'head_dim': 64,
        'rms_norm_eps': 1e-5,
        'vocab_size': 49280,
        'max_position_embeddings': 8192,
    },
    'vision_config': {
        'hidden_size': 768,
        'intermediate_size': 3072,
        'num_hidden_layers': 12,
        'num_attention_heads': 12,
        'image_size': 512,
        'patch_size': 16,
    },
}
# X-VLA at a size for a CPU; the published one's widths are two to four times these.
XVLA = {
    'hidden_size': 512,
    'depth': 8,
    'num_heads': 8,
    'num_domains': 5,
    'action_mode': 'auto',
    'max_action_dim': 20,
    'max_state_dim': 20,
    'resize_imgs_with_padding': (224, 224),
    'num_image_views': 3,
    'florence_config': {
        'projection_dim': 384,
        'text_config': {
            'model_type': 'bart',
            'vocab_size': 1024,
            'd_model': 384,
            'encoder_layers': 4,
            'encoder_attention_heads': 6,
            'encoder_ffn_dim': 1536,
            'decoder_layers': 1,
            'decoder_attention_heads': 6,
            'decoder_ffn_dim': 384,
            'max_position_embeddings': 256,
        },
        'vision_config': {
            'embed_dim': [64, 128, 256, 512],
            'depths': [1, 1, 3, 1],
            'num_heads': [2, 4, 8, 16],
            'num_groups': [2, 4, 8, 16],
            'projection_dim': 384,
        },
    },
}
# MolmoAct2 and VLA-JEPA at sizes for a CPU: widths a third or a quarter, and depths a third or half
# of the published ones. As many tokens of an image, tokens of a chunk and steps as published.
MOLMOACT2 = {
    'action_mode': 'continuous',
    'inference_action_mode': 'continuous',
    'model_dtype': 'float32',
    'setup_type': 'single so101 arm',
    'control_mode': 'absolute joint pose',
    # As many as the tokenizer has.
    'num_state_tokens': 32,
}
VLA_JEPA = {
    'torch_dtype': 'float32',
    # Serves training, and has a published file of its own.
    'enable_world_model': False,
    'resize_images_to': (224, 224),
    'action_num_layers': 8,
    'action_num_heads': 6,
    'action_attention_head_dim': 64,
    'action_hidden_size': 512,
}
# Settings of a policy beside its features.
SETTINGS: dict[str, dict[str, Any]] = {
    'act': {'pretrained_backbone_weights': None},
    'diffusion': DIFFUSION,
    'xvla': XVLA,
    'molmoact2': MOLMOACT2,
    'vla_jepa': VLA_JEPA,
}


@dataclass(frozen=True)
class Base:
    """Vision-language model in a folder of its own, which the policy's folder only names.

    Attributes:
        setting: of config.json of the policy, names the folder.
        module, name: its class.
        files: what its files say otherwise than those beside the tokenizer.
    """

    setting: str
    module: str
    name: str
    files: dict[str, dict[str, Any]]


BASES = {
    'molmoact2': Base(
        'checkpoint_path',
        'lerobot.policies.molmoact2.modeling_molmoact2',
        'MolmoAct2ForConditionalGeneration',
        {
            'config.json': {
                'max_action_horizon': 30,
                'text_config': {
                    'hidden_size': 512,
                    'intermediate_size': 1920,
                    'num_hidden_layers': 12,
                    'num_attention_heads': 8,
                    'num_key_value_heads': 2,
                    'head_dim': 64,
                    'max_position_embeddings': 2048,
                },
                'vit_config': {
                    'hidden_size': 288,
                    'intermediate_size': 1088,
                    'num_hidden_layers': 12,
                    'num_attention_heads': 4,
                    'num_key_value_heads': 4,
                    'head_dim': 72,
                    'image_default_input_size': [378, 378],
                    'image_num_pos': 729,
                },
                'adapter_config': {
                    'vit_layers': [-1, -4],
                    'hidden_size': 288,
                    'intermediate_size': 1920,
                    'num_attention_heads': 4,
                    'num_key_value_heads': 4,
                    'head_dim': 72,
                    'text_hidden_size': 512,
                },
                'action_expert_config': {
                    'hidden_size': 256,
                    'num_layers': 12,
                    'num_heads': 4,
                    'ffn_multiple_of': 256,
                    'timestep_embed_dim': 256,
                },
            },
            'processor_config.json': {'image_processor': {'size': {'height': 378, 'width': 378}}},
        },
    ),
    'vla_jepa': Base(
        'qwen_model_name',
        'transformers',
        'Qwen3VLForConditionalGeneration',
        {
            'config.json': {
                'text_config': {
                    'hidden_size': 512,
                    'intermediate_size': 1536,
                    'num_hidden_layers': 14,
                    'num_attention_heads': 8,
                    'num_key_value_heads': 4,
                    'head_dim': 64,
                    'rope_parameters': {'mrope_section': [12, 10, 10]},
                    # LeRobot computes logits that it does not use: they keep their share.
                    'vocab_size': 151936 // 8,
                },
                'vision_config': {
                    'hidden_size': 256,
                    'intermediate_size': 1024,
                    'depth': 12,
                    'num_heads': 4,
                    'deepstack_visual_indexes': [3, 6, 9],
                    'num_position_embeddings': 2304,
                    'out_hidden_size': 512,
                    'patch_size': 16,
                },
            },
            'processor_config.json': {
                'image_processor': {
                    'patch_size': 16,
                    'size': {'shortest_edge': 65536, 'longest_edge': 16777216},
                }
            },
        },
    ),
}
# Layers of pi0.5 at a size for a CPU, and for a rehearsal.
PI05_DEPTHS = {'mid': 12, 'tiny': 2}
PI05_HEADS = {'num_heads': 8, 'num_kv_heads': 1, 'head_dim': 64}
PI05_WIDTHS = {
    'gemma_2b': {'width': 512, 'mlp_dim': 2048},
    'gemma_300m': {'width': 256, 'mlp_dim': 1024},
}
PI05_VISION = {
    'hidden_size': 384,
    'intermediate_size': 1536,
    'num_attention_heads': 6,
    'projection_dim': 512,
}
PI05_VOCABULARY = 32000
PI05_PROMPT_TOKENS = {'mid': 96}


@dataclass(frozen=True)
class Options:
    """Options that the process is started with.

    Attributes:
        size: of pi0.5: 'published', 'mid' or 'tiny'; those that draw their own noise are 'small',
            the others 'published'.
        tokenizer: file, or '' for a policy without a prompt; with a model of `BASES` the model's
            other files, of another size, are beside it.
        device: 'cpu' or 'cuda'.
        precision: 'float32'; 'tf32', with the GPU products and convolutions of
            `lerobot_eval.py`; 'bfloat16', as LeRobot has it by default in `PRECISION`'s, with the
            same.
        compile_mode: of LeRobot's `torch.compile`; '' runs eagerly.
    """

    family: str
    size: str
    folder: str
    tokenizer: str
    device: str
    threads: int = 1
    precision: str = 'float32'
    compile_mode: str = ''


def prepare_lerobot(options: Options) -> None:
    """Keep LeRobot from the network, and give it the size and the tokenizer."""
    os.environ['HF_HUB_OFFLINE'] = '1'
    if options.family == 'diffusion':
        return
    replace_processor()
    if options.family in ('pi05', 'xvla'):
        replace_tokenizer(Path(options.tokenizer))
    if options.family == 'pi05' and options.size in PI05_DEPTHS:
        shrink_pi05(PI05_DEPTHS[options.size])


def replace_processor() -> None:
    """Stand in for a processor of SmolVLA that inference never uses."""
    from lerobot.policies.smolvla import smolvlm_with_expert

    tokenizer = SimpleNamespace(fake_image_token_id=1, global_image_token_id=2)
    stand_in = SimpleNamespace(tokenizer=tokenizer)
    smolvlm_with_expert.AutoProcessor = SimpleNamespace(from_pretrained=lambda name: stand_in)


def replace_tokenizer(tokenizer: Path) -> None:
    """Give LeRobot the file for the tokenizer that it would fetch."""
    from lerobot.processor import tokenizer_processor
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer))
    fast.pad_token = '<pad>' if '<pad>' in fast.get_vocab() else fast.convert_ids_to_tokens(0)
    tokenizer_processor.AutoTokenizer = SimpleNamespace(from_pretrained=lambda name: fast)


def shrink_pi05(depth: int) -> None:
    """Give LeRobot's pi0.5 the sizes above; its configuration knows none but the published ones."""
    from lerobot.policies.pi05 import modeling_pi05

    policy, expert = (
        modeling_pi05.PaliGemmaForConditionalGenerationWithPiGemma,
        modeling_pi05.PiGemmaForCausalLM,
    )

    def small_policy(config: Any) -> Any:
        for name, size in {**PI05_VISION, 'num_hidden_layers': depth}.items():
            setattr(config.vision_config, name, size)
        config.text_config.vocab_size = PI05_VOCABULARY
        return policy(config=config)

    def small_expert(config: Any) -> Any:
        config.vocab_size = PI05_VOCABULARY
        return expert(config=config)

    sizes = {
        name: modeling_pi05.GemmaConfig(depth=depth, **PI05_HEADS, **widths)
        for name, widths in PI05_WIDTHS.items()
    }
    modeling_pi05.get_gemma_config = sizes.__getitem__
    modeling_pi05.PaliGemmaForConditionalGenerationWithPiGemma = small_policy
    modeling_pi05.PiGemmaForCausalLM = small_expert


def imported(family: str, part: str, name: str) -> Any:
    """Return what is called so in a module of LeRobot's policy."""
    return getattr(import_module(f'lerobot.policies.{family}.{part}_{family}'), name)


def policy_class(family: str) -> Any:
    return imported(family, 'modeling', f'{NAMES[family]}Policy')


def make(options: Options) -> None:
    """Write a folder as LeRobot saves it, with seeded random weights drawn on the device.

    pi0.5 of published size is in bfloat16: half of the file.
    """
    from lerobot.configs.types import FeatureType, PolicyFeature

    family, folder = options.family, Path(options.folder).resolve()
    torch.manual_seed(0)
    joints = JOINTS[family]
    inputs = {
        f'observation.images.camera{i + 1}': PolicyFeature(FeatureType.VISUAL, (3, *SIZES[family]))
        for i in range(CAMERAS[family])
    }
    inputs['observation.state'] = PolicyFeature(FeatureType.STATE, (joints,))
    outputs = {'action': PolicyFeature(FeatureType.ACTION, (joints,))}
    features = {'input_features': inputs, 'output_features': outputs}
    settings = SETTINGS.get(family, {})
    if family == 'pi05':
        settings = {
            'dtype': 'float32' if options.size == 'mid' else 'bfloat16',
            'tokenizer_max_length': PI05_PROMPT_TOKENS.get(options.size, 200),
        }
    elif family == 'smolvla':
        settings = {'vlm_model_name': str(write_vlm(folder, Path(options.tokenizer)))}
    elif family in BASES:
        base = write_base(BASES[family], folder, Path(options.tokenizer))
        settings = {**settings, BASES[family].setting: base.name}
    config_class = imported(family, 'configuration', f'{NAMES[family]}Config')
    config = config_class(**features, **settings, device=options.device)
    with torch.device(options.device):
        policy = policy_class(family)(config)
    draw_constants(policy)
    rng = np.random.default_rng(0)
    statistics = {
        name: {
            'mean': torch.tensor(rng.normal(0, 0.1, shape), dtype=torch.float32),
            'std': torch.tensor(rng.uniform(0.5, 1.5, shape), dtype=torch.float32),
            **{name: torch.full(shape, -1.5) for name in ('q01', 'min')},
            **{name: torch.full(shape, 1.5) for name in ('q99', 'max')},
        }
        for name, shape in (
            *((name, (3, 1, 1)) for name in inputs if 'images' in name),
            ('observation.state', (joints,)),
            ('action', (joints,)),
        )
    }
    policy.save_pretrained(folder)
    processors = imported(family, 'processor', f'make_{family}_pre_post_processors')
    for processor in processors(config, dataset_stats=statistics):
        processor.save_pretrained(folder)


@torch.no_grad()
def draw_constants(policy: torch.nn.Module) -> None:
    """Draw a new policy's constants, so that chunks depend on them.

    Those are frozen norms and zero matrices: with pi0.5's zero gates no expert layer adds
    anything.
    """
    for name, buffer in policy.named_buffers():
        if name.endswith('running_var'):
            buffer.uniform_(0.5, 1.5)
    for matrix in policy.parameters():
        if matrix.ndim > 1 and not matrix.any():
            matrix.normal_(0.0, 0.02)
    # Gates of MolmoAct2's expert: with zeros its chunk would hardly depend on the images.
    for name, numbers in policy.named_parameters():
        if name.endswith('modulation.linear.bias'):
            numbers.normal_()


def write_vlm(folder: Path, tokenizer: Path) -> Path:
    """Write the configuration and the tokenizer that a folder of SmolVLA only names."""
    from transformers import PreTrainedTokenizerFast, SmolVLMConfig

    vlm = folder.with_name(f'{folder.name}_vlm')
    SmolVLMConfig(**SMOLVLM2).save_pretrained(vlm)
    fast = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer))
    fast.pad_token = fast.convert_ids_to_tokens(0)
    fast.save_pretrained(vlm)
    return vlm


def write_base(base: Base, folder: Path, tokenizer: Path) -> Path:
    """Write the model that a folder only names beside it, at its size, with random weights."""

    def changed(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
        parts = {
            name: changed(settings[name], value) if isinstance(value, dict) else value
            for name, value in changes.items()
        }
        return {**settings, **parts}

    model = folder.with_name(f'{folder.name}_base')
    shutil.copytree(tokenizer.parent, model, dirs_exist_ok=True)
    for name, changes in base.files.items():
        file = model / name
        file.write_text(json.dumps(changed(json.loads(file.read_text()), changes)))
    kind = getattr(import_module(base.module), base.name)
    # LeRobot wants its weights too, which those of the policy replace.
    kind(kind.config_class.from_pretrained(model)).save_pretrained(model)
    return model


def device_fault(device: str) -> str:
    """Say why PyTorch cannot run on the device here; empty where it can."""
    if device == 'cpu' or torch.cuda.is_available():
        return ''
    return f'its PyTorch {torch.__version__} ({torch.version.cuda or "no CUDA"}) sees no GPU'


def set_products(options: Options) -> None:
    """Allow in float32 on a GPU what the precision says."""
    if options.device == 'cpu':
        return
    allowed = options.precision != 'float32'
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed
    torch.backends.cudnn.benchmark = allowed


class Server:
    """One policy of LeRobot, from a folder of `make`, and its processors."""

    def __init__(self, options: Options) -> None:
        from lerobot.configs.policies import PreTrainedConfig
        from lerobot.policies.utils import prepare_observation_for_inference
        from lerobot.processor import PolicyProcessorPipeline
        from lerobot.processor.converters import (
            batch_to_transition,
            policy_action_to_transition,
            transition_to_batch,
            transition_to_policy_action,
        )

        set_products(options)
        self.family, self.device = options.family, torch.device(options.device)
        self.prepare = prepare_observation_for_inference
        folder, whole = options.folder, options.precision != 'bfloat16'
        # Every number is read from the file: draw none.
        for name in ('normal_', 'uniform_', 'trunc_normal_'):
            setattr(torch.Tensor, name, lambda self, *arguments, **options: self)
        kind = policy_class(self.family)
        config = PreTrainedConfig.from_pretrained(folder)
        config.device = options.device
        if self.family in PRECISION:
            setattr(config, PRECISION[self.family], 'float32' if whole else 'bfloat16')
        if self.family == 'vla_jepa' and whole:
            # It computes its vision-language model in bfloat16, whatever the weights are in.
            from lerobot.policies.vla_jepa import modeling_vla_jepa

            modeling_vla_jepa._get_autocast_context = lambda *device_and_type: nullcontext()
        if options.compile_mode:
            config.compile_model, config.compile_mode = True, options.compile_mode
        self.policy = kind.from_pretrained(folder, config=config)
        found = {p.dtype for p in self.policy.parameters()}
        if (found == {torch.float32}) != whole:
            raise ValueError(
                f'{folder}: LeRobot loaded {found} where {options.precision} was asked for'
            )
        self.before = PolicyProcessorPipeline.from_pretrained(
            pretrained_model_name_or_path=folder,
            config_filename='policy_preprocessor.json',
            overrides={'device_processor': {'device': options.device}},
            to_transition=batch_to_transition,
            to_output=transition_to_batch,
        )
        self.after = PolicyProcessorPipeline.from_pretrained(
            pretrained_model_name_or_path=folder,
            config_filename='policy_postprocessor.json',
            to_transition=policy_action_to_transition,
            to_output=transition_to_policy_action,
        )

    @torch.inference_mode()
    def infer(self, arrays: dict[str, np.ndarray]) -> np.ndarray:
        """Return the chunk (H, A) in the robot's units."""
        batch = self.batch(arrays)
        options = {}
        if self.family != 'act':
            options['noise'] = torch.from_numpy(arrays['noise'])[None].to(self.device)
        if self.family in OWN_NOISE:
            noise = options.pop('noise')
            torch.randn = lambda *shape, **given: noise
        return self.after(self.policy.predict_action_chunk(batch, **options))[0].numpy()

    def batch(self, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
        """Prepare an observation; with several steps their axis, oldest first, is the second."""
        steps = []
        for ago in reversed(range(HISTORY[self.family])):
            end = f'_{ago}_steps_ago' if ago else ''
            given = {
                f'observation.{name.removesuffix(end)}': array
                for name, array in arrays.items()
                if name.endswith(end) and name != 'noise' and bool(ago) == ('_ago' in name)
            }
            steps.append(self.before(self.prepare(given, self.device, TASK)))
        if len(steps) == 1:
            return steps[0]
        seen = [name for name in steps[0] if name.startswith('observation.')]
        return {name: torch.stack([step[name] for step in steps], dim=1) for name in seen}

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == 'cuda':
            torch.cuda.synchronize()

    def facts(self) -> dict[str, Any]:
        """Return versions and number of parameters."""
        from importlib.metadata import version

        packages = {'python': sys.version.split()[0], 'torch': torch.__version__}
        used = 'diffusers' if self.family == 'diffusion' else 'transformers'
        packages |= {name: version(name) for name in ('lerobot', used, 'torchvision')}
        if self.device.type == 'cuda':
            packages['cuda'] = str(torch.version.cuda)
        parameters = sum(p.numel() for p in self.policy.parameters())
        return {'versions': packages, 'parameters': parameters}


def compiled_graphs() -> int:
    """Number of graphs that PyTorch's compiler has compiled so far."""
    from torch._dynamo.utils import counters

    return int(counters['stats']['unique_graphs'])


def answer(server: Server, request: dict[str, str]) -> dict[str, Any]:
    """Infer as a request says, and write the chunk."""
    with np.load(request['inputs']) as file:
        arrays = dict(file)
    graphs = compiled_graphs()
    server.synchronize()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    chunk = server.infer(arrays)
    server.synchronize()
    took, cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
    np.save(request['chunk'], chunk)
    found = {'ms': took * 1e3, 'cpu_ms': cpu * 1e3, 'graphs': compiled_graphs() - graphs}
    if server.device.type == 'cuda':
        found['peak_memory_gib'] = torch.cuda.max_memory_allocated() / 2**30
    return found


def serve(options: Options) -> None:
    replies = os.fdopen(os.dup(1), 'w')
    # LeRobot prints while it loads.
    os.dup2(2, 1)

    def reply(found: dict[str, Any]) -> None:
        print(json.dumps(found), file=replies, flush=True)

    torch.set_num_threads(options.threads)
    try:
        server = Server(options)
        reply(server.facts())
        for line in sys.stdin:
            reply(answer(server, json.loads(line)))
    except Exception as error:
        lines = str(error).splitlines() or ['']
        reply({'error': f'{type(error).__name__}: {lines[0][:200]}'})
        raise


def main() -> int:
    verb, options = sys.argv[1], Options(**json.loads(sys.argv[2]))
    if verb == 'check':
        print(device_fault(options.device))
        return 0
    # A folder names the model beside it by a path that begins here.
    os.chdir(Path(options.folder).parent)
    prepare_lerobot(options)
    if verb == 'make':
        make(options)
    else:
        serve(options)
    return 0


if __name__ == '__main__':
    sys.exit(main())
