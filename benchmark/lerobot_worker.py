"""LeRobot's side of `lerobot_turns.py`, run by the Python that LeRobot is installed in.

    lerobot_worker.py make FAMILY FOLDER TOKENIZER
        write a folder of random weights
    lerobot_worker.py serve FAMILY FOLDER TOKENIZER THREADS DTYPE
        load it and infer, one JSON line a request

Imports LeRobot, PyTorch, numpy and the standard library alone. A request names a file of arrays
(images, state, noise); the answer gives the time of one inference and the file of its chunk. The
time is that of everything between the camera's bytes and the chunk in the robot's units: LeRobot's
own preparation, processors and policy class.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

TASK = 'put the cup on the shelf'
# As the published ones: lerobot/smolvla_base reads three cameras, ALOHA's ACT one.
CAMERAS = {'act': 1, 'smolvla': 3, 'pi05': 3}
JOINTS = {'act': 14, 'smolvla': 6, 'pi05': 7}
HEIGHT, WIDTH = 480, 640
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
# pi0.5 at a size for a CPU, as benchmark/mid_size.py has it.
PI05_HEADS = {'depth': 12, 'num_heads': 8, 'num_kv_heads': 1, 'head_dim': 64}
PI05_SIZES = {
    'gemma_2b': {'width': 512, 'mlp_dim': 2048, **PI05_HEADS},
    'gemma_300m': {'width': 256, 'mlp_dim': 1024, **PI05_HEADS},
}
PI05_VISION = {
    'hidden_size': 384,
    'intermediate_size': 1536,
    'num_hidden_layers': 12,
    'num_attention_heads': 6,
    'projection_dim': 512,
}
PI05_VOCABULARY = 32000
PI05_PROMPT_TOKENS = 96


def offline() -> None:
    """Keep LeRobot from the network; stand in for a processor that inference never uses."""
    os.environ['HF_HUB_OFFLINE'] = '1'
    from lerobot.policies.smolvla import smolvlm_with_expert

    tokenizer = SimpleNamespace(fake_image_token_id=1, global_image_token_id=2)
    stand_in = SimpleNamespace(tokenizer=tokenizer)
    smolvlm_with_expert.AutoProcessor = SimpleNamespace(from_pretrained=lambda name: stand_in)


def shrink_pi05(tokenizer: Path) -> None:
    """Give LeRobot's pi0.5 the sizes above, whose configuration knows none but the published ones.

    Its tokenizer, which it would fetch, is the file instead.
    """
    from lerobot.policies.pi05 import modeling_pi05
    from lerobot.processor import tokenizer_processor
    from transformers import PreTrainedTokenizerFast

    policy, expert = (
        modeling_pi05.PaliGemmaForConditionalGenerationWithPiGemma,
        modeling_pi05.PiGemmaForCausalLM,
    )

    def small_policy(config: Any) -> Any:
        for name, size in PI05_VISION.items():
            setattr(config.vision_config, name, size)
        config.text_config.vocab_size = PI05_VOCABULARY
        return policy(config=config)

    def small_expert(config: Any) -> Any:
        config.vocab_size = PI05_VOCABULARY
        return expert(config=config)

    sizes = {name: modeling_pi05.GemmaConfig(**one) for name, one in PI05_SIZES.items()}
    modeling_pi05.get_gemma_config = sizes.__getitem__
    modeling_pi05.PaliGemmaForConditionalGenerationWithPiGemma = small_policy
    modeling_pi05.PiGemmaForCausalLM = small_expert
    fast = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer))
    fast.pad_token = fast.convert_ids_to_tokens(0)
    tokenizer_processor.AutoTokenizer = SimpleNamespace(from_pretrained=lambda name: fast)


def policy_class(family: str) -> Any:
    if family == 'pi05':
        from lerobot.policies.pi05.modeling_pi05 import PI05Policy

        return PI05Policy
    if family == 'act':
        from lerobot.policies.act.modeling_act import ACTPolicy

        return ACTPolicy
    from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy

    return SmolVLAPolicy


def make(family: str, folder: Path, tokenizer: Path) -> None:
    """Write a folder as LeRobot saves it, with seeded random weights."""
    from lerobot.configs.types import FeatureType, PolicyFeature

    torch.manual_seed(0)
    joints = JOINTS[family]
    inputs = {
        f'observation.images.camera{i + 1}': PolicyFeature(FeatureType.VISUAL, (3, HEIGHT, WIDTH))
        for i in range(CAMERAS[family])
    }
    inputs['observation.state'] = PolicyFeature(FeatureType.STATE, (joints,))
    outputs = {'action': PolicyFeature(FeatureType.ACTION, (joints,))}
    features = {'input_features': inputs, 'output_features': outputs}
    if family == 'act':
        from lerobot.policies.act.configuration_act import ACTConfig
        from lerobot.policies.act.processor_act import make_act_pre_post_processors as processors

        config = ACTConfig(**features, device='cpu', pretrained_backbone_weights=None)
    elif family == 'pi05':
        from lerobot.policies.pi05.configuration_pi05 import PI05Config
        from lerobot.policies.pi05.processor_pi05 import make_pi05_pre_post_processors as processors

        config = PI05Config(**features, device='cpu', tokenizer_max_length=PI05_PROMPT_TOKENS)
    else:
        from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
        from lerobot.policies.smolvla.processor_smolvla import (
            make_smolvla_pre_post_processors as processors,
        )

        config = SmolVLAConfig(
            **features, device='cpu', vlm_model_name=str(write_vlm(folder, tokenizer))
        )
    policy = policy_class(family)(config)
    with torch.no_grad():
        for name, buffer in policy.named_buffers():
            # Frozen norms that do something.
            if name.endswith('running_var'):
                buffer.uniform_(0.5, 1.5)
    rng = np.random.default_rng(0)
    statistics = {
        name: {
            'mean': torch.tensor(rng.normal(0, 0.1, shape), dtype=torch.float32),
            'std': torch.tensor(rng.uniform(0.5, 1.5, shape), dtype=torch.float32),
            'q01': torch.full(shape, -1.5),
            'q99': torch.full(shape, 1.5),
        }
        for name, shape in (
            *((name, (3, 1, 1)) for name in inputs if 'images' in name),
            ('observation.state', (joints,)),
            ('action', (joints,)),
        )
    }
    policy.save_pretrained(folder)
    for processor in processors(config, dataset_stats=statistics):
        processor.save_pretrained(folder)


def write_vlm(folder: Path, tokenizer: Path) -> Path:
    """Write the configuration and the tokenizer that a folder of SmolVLA only names."""
    from transformers import PreTrainedTokenizerFast, SmolVLMConfig

    vlm = folder.with_name(f'{folder.name}_vlm')
    SmolVLMConfig(**SMOLVLM2).save_pretrained(vlm)
    fast = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer))
    fast.pad_token = fast.convert_ids_to_tokens(0)
    fast.save_pretrained(vlm)
    return vlm


class Server:
    """One policy of LeRobot, and its processors.

    Args:
        family: of the folder.
        folder: that `make` wrote.
        dtype: 'float32', or 'bfloat16' as LeRobot's pi0.5 offers it.
    """

    def __init__(self, family: str, folder: Path, dtype: str) -> None:
        from lerobot.configs.policies import PreTrainedConfig
        from lerobot.policies.utils import prepare_observation_for_inference
        from lerobot.processor import PolicyProcessorPipeline
        from lerobot.processor.converters import (
            batch_to_transition,
            policy_action_to_transition,
            transition_to_batch,
            transition_to_policy_action,
        )

        self.family = family
        self.prepare = prepare_observation_for_inference
        # Every number is read from the file: draw none.
        for name in ('normal_', 'uniform_', 'trunc_normal_'):
            setattr(torch.Tensor, name, lambda self, *arguments, **options: self)
        kind = policy_class(family)
        config = PreTrainedConfig.from_pretrained(str(folder))
        if dtype != 'float32':
            config.dtype = dtype
        self.policy = kind.from_pretrained(str(folder), config=config)
        found = {p.dtype for p in self.policy.parameters()}
        if (found == {torch.float32}) != (dtype == 'float32'):
            raise ValueError(f'{folder}: LeRobot loaded {found} where {dtype} was asked for')
        self.before = PolicyProcessorPipeline.from_pretrained(
            pretrained_model_name_or_path=str(folder),
            config_filename='policy_preprocessor.json',
            to_transition=batch_to_transition,
            to_output=transition_to_batch,
        )
        self.after = PolicyProcessorPipeline.from_pretrained(
            pretrained_model_name_or_path=str(folder),
            config_filename='policy_postprocessor.json',
            to_transition=policy_action_to_transition,
            to_output=transition_to_policy_action,
        )

    @torch.inference_mode()
    def infer(self, arrays: dict[str, np.ndarray]) -> np.ndarray:
        """Return the chunk (H, A) in the robot's units."""
        given = {f'observation.{name}': arrays[name] for name in arrays if name != 'noise'}
        batch = self.before(self.prepare(given, torch.device('cpu'), TASK))
        options = {}
        if self.family != 'act':
            options['noise'] = torch.from_numpy(arrays['noise'])[None]
        return self.after(self.policy.predict_action_chunk(batch, **options))[0].numpy()


def serve(family: str, folder: Path, threads: int, dtype: str) -> None:
    replies = os.fdopen(os.dup(1), 'w')
    # LeRobot prints while it loads.
    os.dup2(2, 1)
    torch.set_num_threads(threads)
    server = Server(family, folder, dtype)
    from importlib.metadata import version

    packages = {'python': sys.version.split()[0], 'torch': torch.__version__}
    packages |= {name: version(name) for name in ('lerobot', 'transformers', 'torchvision')}
    parameters = sum(p.numel() for p in server.policy.parameters())
    print(json.dumps({'versions': packages, 'parameters': parameters}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        with np.load(request['inputs']) as file:
            arrays = dict(file)
        begin, begin_cpu = time.perf_counter(), time.process_time()
        chunk = server.infer(arrays)
        took, cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
        np.save(request['chunk'], chunk)
        print(json.dumps({'ms': took * 1e3, 'cpu_ms': cpu * 1e3}), file=replies, flush=True)


def main() -> int:
    verb, family, folder, tokenizer, *rest = sys.argv[1:]
    offline()
    if family == 'pi05':
        shrink_pi05(Path(tokenizer))
    if verb == 'make':
        make(family, Path(folder).resolve(), Path(tokenizer))
    else:
        threads, dtype = rest
        serve(family, Path(folder), int(threads), dtype)
    return 0


if __name__ == '__main__':
    sys.exit(main())
