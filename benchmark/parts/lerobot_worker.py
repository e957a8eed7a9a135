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
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

TASK = 'put the cup on the shelf'
CAMERAS, JOINTS = 3, 7
# (height, width) of the images.
SIZE = (480, 640)
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
        size: 'published', 'mid' or 'tiny'.
        tokenizer: file.
        device: 'cpu' or 'cuda'.
        precision: 'float32', or 'bfloat16' with the GPU products of `lerobot_eval.py`.
        compile_mode: of LeRobot's `torch.compile`; '' runs eagerly.
    """

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
    replace_tokenizer(Path(options.tokenizer))
    if options.size in PI05_DEPTHS:
        shrink_pi05(PI05_DEPTHS[options.size])


def replace_tokenizer(tokenizer: Path) -> None:
    """Give LeRobot's pi0.5 the file for the tokenizer that it would fetch."""
    from lerobot.processor import tokenizer_processor
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer))
    fast.pad_token = fast.convert_ids_to_tokens(0)
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


def make(options: Options) -> None:
    """Write a folder as LeRobot saves it, with seeded random weights drawn on the device.

    That of published size is in bfloat16: half of the file.
    """
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.pi05.configuration_pi05 import PI05Config
    from lerobot.policies.pi05.modeling_pi05 import PI05Policy
    from lerobot.policies.pi05.processor_pi05 import make_pi05_pre_post_processors

    folder = Path(options.folder).resolve()
    torch.manual_seed(0)
    inputs = {
        f'observation.images.camera{i + 1}': PolicyFeature(FeatureType.VISUAL, (3, *SIZE))
        for i in range(CAMERAS)
    }
    inputs['observation.state'] = PolicyFeature(FeatureType.STATE, (JOINTS,))
    config = PI05Config(
        input_features=inputs,
        output_features={'action': PolicyFeature(FeatureType.ACTION, (JOINTS,))},
        device=options.device,
        dtype='float32' if options.size == 'mid' else 'bfloat16',
        tokenizer_max_length=PI05_PROMPT_TOKENS.get(options.size, 200),
    )
    with torch.device(options.device):
        policy = PI05Policy(config)
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
            ('observation.state', (JOINTS,)),
            ('action', (JOINTS,)),
        )
    }
    policy.save_pretrained(folder)
    for processor in make_pi05_pre_post_processors(config, dataset_stats=statistics):
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
        from lerobot.policies.pi05.modeling_pi05 import PI05Policy
        from lerobot.policies.utils import prepare_observation_for_inference
        from lerobot.processor import PolicyProcessorPipeline
        from lerobot.processor.converters import (
            batch_to_transition,
            policy_action_to_transition,
            transition_to_batch,
            transition_to_policy_action,
        )

        set_products(options)
        self.device = torch.device(options.device)
        self.prepare = prepare_observation_for_inference
        folder, whole = options.folder, options.precision != 'bfloat16'
        # Every number is read from the file: draw none.
        for name in ('normal_', 'uniform_', 'trunc_normal_'):
            setattr(torch.Tensor, name, lambda self, *arguments, **options: self)
        config = PreTrainedConfig.from_pretrained(folder)
        config.device = options.device
        config.dtype = 'float32' if whole else 'bfloat16'
        if options.compile_mode:
            config.compile_model, config.compile_mode = True, options.compile_mode
        self.policy = PI05Policy.from_pretrained(folder, config=config)
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
        given = {f'observation.{name}': array for name, array in arrays.items() if name != 'noise'}
        batch = self.before(self.prepare(given, self.device, TASK))
        noise = torch.from_numpy(arrays['noise'])[None].to(self.device)
        return self.after(self.policy.predict_action_chunk(batch, noise=noise))[0].numpy()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == 'cuda':
            torch.cuda.synchronize()

    def facts(self) -> dict[str, Any]:
        """Return versions and number of parameters."""
        from importlib.metadata import version

        packages = {'python': sys.version.split()[0], 'torch': torch.__version__}
        packages |= {name: version(name) for name in ('lerobot', 'transformers', 'torchvision')}
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
    prepare_lerobot(options)
    if verb == 'make':
        make(options)
    else:
        serve(options)
    return 0


if __name__ == '__main__':
    sys.exit(main())
