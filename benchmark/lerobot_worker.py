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
from typing import Any

import numpy as np
import torch
from lerobot_checkpoint import TASK, Options, make, policy_class, prepare_lerobot


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
    """One policy of LeRobot, and its processors.

    Args:
        options: options of a folder that `make` wrote.
    """

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
        if self.family == 'pi05':
            config.dtype = 'float32' if whole else 'bfloat16'
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
        given = {f'observation.{name}': arrays[name] for name in arrays if name != 'noise'}
        batch = self.before(self.prepare(given, self.device, TASK))
        options = {}
        if self.family != 'act':
            options['noise'] = torch.from_numpy(arrays['noise'])[None].to(self.device)
        return self.after(self.policy.predict_action_chunk(batch, **options))[0].numpy()

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
