"""The family of docs/howto/adding_a_family.md from a checkpoint's folder to commands.

Nothing in the package knows it: a LeRobot folder goes through `vla_runtime export`, ONNX Runtime
and `Policy` to the executor.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_folders import copy_lerobot_folder, edit_config, edit_json
from network_cases import relative_error
from safetensors.torch import save_file

from vla_runtime.cli.main import main
from vla_runtime.execution.columns import Column
from vla_runtime.execution.command import CommandKind, Reason
from vla_runtime.execution.config import ExecutorConfig
from vla_runtime.execution.executor import ChunkExecutor
from vla_runtime.execution.parameters import ExecutorParameters
from vla_runtime.families.flow_network import build_network
from vla_runtime.family.declaration import Family
from vla_runtime.family.listing import family_names
from vla_runtime.inference.prefix_cache import CacheMode, CachePolicy
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy
from vla_runtime.types import ActionChunk, ChunkHeader, Observation
from vla_tools.selftest.policies import tried_families

CACHE_MODES: tuple[CacheMode, ...] = ('exact', 'off')
JOINTS = tuple(f'joint_{n}' for n in range(6))
_NAMES = ','.join(JOINTS)
NAMES_AND_UNITS = ('--state-names', _NAMES, '--action-names', _NAMES)
NAMES_AND_UNITS += ('--units', 'rad', '--rate-hz', '25')
EXPORT_OPTIONS = (*NAMES_AND_UNITS, '--advantage', 'task_newline')
THEIR_NAMES = {
    'vision.patches': 'vision_tower.patches',
    'words': 'embed_tokens',
    'hidden': 'mlp.hidden',
    'out': 'mlp.out',
}


def write_folder(toy: Family, folder: Path) -> Path:
    """A LeRobot folder of the toy: another family's, with what is the toy's own changed."""
    copy_lerobot_folder(folder)
    dims = toy.presets['toy']
    edit_config(
        folder,
        type='toy',
        image_resolution=[dims.image_size, dims.image_size],
        chunk_size=dims.horizon,
        max_action_dim=dims.action_dim,
        max_state_dim=dims.state_dim,
        num_steps=4,
        tokenizer_max_length=dims.prompt_length,
    )
    own = 'pi05_prepare_state_tokenizer_processor_step'

    def change(document: dict) -> None:
        document['steps'] = [s for s in document['steps'] if s['registry_name'] != own]
        for step in document['steps']:
            if step['registry_name'] == 'tokenizer_processor':
                step['config']['max_length'] = dims.prompt_length

    edit_json(folder / 'policy_preprocessor.json', change)
    torch.manual_seed(1)
    network = build_network('toy', dims)
    tensors = {}
    for name, tensor in network.state_dict().items():
        module, _, leaf = name.rpartition('.')
        tensors[f'model.{THEIR_NAMES[module]}.{leaf}'] = tensor
    (folder / 'model.safetensors').unlink()
    save_file(tensors, folder / 'model.safetensors')
    return folder


@pytest.fixture(scope='module')
def bundle(toy: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy's bundle with ONNX files, as the verb writes it."""
    folder = write_folder(toy, tmp_path_factory.mktemp('checkpoint') / 'toy')
    target = tmp_path_factory.mktemp('bundles') / 'toy'
    assert main(['export', str(folder), '--out', str(target), *EXPORT_OPTIONS]) == 0
    shutil.rmtree(folder)
    return target


def observation(seed: int = 0) -> Observation:
    rng = np.random.default_rng(seed)
    images = {name: rng.integers(0, 256, (48, 64, 3), dtype=np.uint8) for name in ('top', 'wrist')}
    return Observation(images, rng.uniform(-0.1, 0.1, 6), 'touch the red block')


def chunks(bundle: Path, backend: str, settings: PolicySettings) -> list[ActionChunk]:
    policy = Policy.load(bundle, backend=backend, settings=settings)
    try:
        return [policy.infer(observation(seed))[0] for seed in (0, 0, 1)]
    finally:
        policy.close()


@pytest.mark.parametrize('cfg_enabled', [False, True])
def test_onnx_runtime_gives_the_chunks_of_pytorch(bundle: Path, cfg_enabled: bool) -> None:
    settings = PolicySettings(cfg_enabled=cfg_enabled, cfg_beta=1.5)
    ours, theirs = (chunks(bundle, backend, settings) for backend in ('onnxruntime', 'torch'))
    for one, other in zip(ours, theirs, strict=True):
        assert relative_error(one.normalised, torch.from_numpy(other.normalised)) < 5e-5
    assert not np.array_equal(ours[0].actions, ours[2].actions)


def test_the_prefix_cache_finds_what_is_equal_and_changes_nothing(bundle: Path) -> None:
    policies = [
        Policy.load(
            bundle, backend='onnxruntime', settings=PolicySettings(cache=CachePolicy(mode=mode))
        )
        for mode in CACHE_MODES
    ]
    runs = []
    for seed in (0, 0, 1):
        (chunk, report), (plain, _) = (policy.infer(observation(seed)) for policy in policies)
        assert np.array_equal(chunk.actions, plain.actions)
        runs.append(report.runs['prefix'])
    assert runs == [1, 0, 1]
    for policy in policies:
        policy.close()


def test_selftest_tries_machines_without_it(toy: Family) -> None:
    assert toy.name in family_names()
    assert toy.name not in tried_families()


def test_verify_repeats_the_comparison(bundle: Path) -> None:
    assert main(['verify', str(bundle)]) == 0


def test_the_executor_follows_its_chunk(bundle: Path) -> None:
    policy = Policy.load(bundle, backend='onnxruntime')
    chunk, _ = policy.infer(observation())
    policy.close()
    assert chunk.names == JOINTS
    executor = ChunkExecutor(
        ExecutorConfig(tuple(Column(name) for name in JOINTS)),
        ExecutorParameters(replan_interval=5, overrun='hold'),
    )
    measured, period_ns = chunk.actions[0].copy(), 10_000_000
    for n in range(1, 120):
        now_s, now_ns = 1e-9 * n * period_ns, n * period_ns
        executor.observe_state(JOINTS, measured.tolist(), now_ns)
        command = executor.tick(now_s, now_ns)
        if command.kind is not CommandKind.IDLE:
            measured = command.setpoints.copy()
        if n == 60:
            assert executor.start(now_s, now_ns).started
        if n == 61:
            result = executor.submit_chunk(
                chunk, ChunkHeader(now_ns, executor.episode, 1), now_s, now_ns
            )
            assert result.refusal is None, result.text
    # After its five steps it holds where the last of them led.
    assert (command.kind, command.reason) == (CommandKind.HOLD, Reason.STARVED)
    np.testing.assert_allclose(measured, chunk.actions[4], atol=1e-9)
