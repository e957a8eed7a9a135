"""The passes of OpenVLA on every engine: graphs, ONNX Runtime, and TensorRT over a fake device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx_bundles import sessions_opened_once, write_onnx_once  # noqa: F401
from openvla_cases import load_openvla_case
from openvla_folders import STATE, options_of, write_folder
from recorded_graphs import RecordedGraphs
from reference_cases import shipped
from tensorrt_machine import Machine, linked_copy

from vla_convert.export.conversion import plan_export, write_export
from vla_convert.export.onnx.cases import record_cases
from vla_runtime.bundle.folder import read_bundle
from vla_runtime.engines.protocol import DenoiseLoop
from vla_runtime.engines.torch import cuda_graph
from vla_runtime.engines.torch import engine as torch_engine
from vla_runtime.engines.torch.token_engine import TorchTokenEngine
from vla_runtime.inference.packed import write_answer
from vla_runtime.inference.recorded_check import check_recorded_cases
from vla_runtime.inference.sessions import Request
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy
from vla_runtime.types import Observation, Reuse

pytestmark = [pytest.mark.cases, pytest.mark.usefixtures('sessions_opened_once')]
PATH = shipped('openvla_full_a')


@pytest.fixture(scope='module')
def bundle(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('openvla')
    source = write_folder(folder / 'policy', PATH)

    def finish(target, spec) -> None:
        write_onnx_once(target, spec, 'float32')
        record_cases(target, spec)

    plan = plan_export(source, options_of(PATH), default_name='tiny')
    write_export(plan, folder / 'bundle', finish=finish)
    return folder / 'bundle'


def observations() -> Iterator[tuple[Observation, np.ndarray]]:
    """Observations of the case, and the actions of each."""
    case = load_openvla_case(PATH)
    for request in case.requests:
        yield (
            Observation(
                images={'image': case.tensors[f'raw_image_{request}'].numpy()},
                state=np.zeros(len(STATE)),
                instruction=case.description['instructions'][request],
            ),
            case.tensors['actions_set_one'][request].numpy(),
        )


def encode(engine, request: int, slot: int = 0) -> None:
    case = load_openvla_case(PATH)
    tokens, mask = case.prompt(request)
    engine.encode_image(0, case.pixels(request)[0].numpy())
    rows = {'tokens': tokens.numpy(), 'token_mask': mask.numpy()}
    engine.encode_prefix(np.ones(1, bool), rows, slot)


def test_one_captured_graph_writes_every_token(monkeypatch):
    case = load_openvla_case(PATH)
    monkeypatch.setattr(torch_engine, 'captures_graphs', lambda device: True)
    monkeypatch.setattr(cuda_graph, 'CudaGraphCapture', RecordedGraphs)
    engine = TorchTokenEngine(case.network, max_rows=1)
    loop = DenoiseLoop(steps=1)
    assert engine.captures(loop)
    for repeat in range(2):
        for request in case.requests:
            slot = request % 2
            encode(engine, request, slot)
            engine.use_prefix(1, slot)
            before = RecordedGraphs.captured
            answer = write_answer(engine, case.network.dims.answer_length, None)
            # One graph a slot, for all places, captured at its first pass.
            assert RecordedGraphs.captured - before == (repeat == 0 and request < 2)
            assert np.array_equal(answer, case.tensors['tokens'][request].numpy())
            found = torch.from_numpy(engine.read_logits()[0])
            assert (found - case.tensors['logits'][request, -1]).abs().max() <= 1e-4
    assert engine.cuda_graph == dict.fromkeys(('vision', 'prefix', 'denoise'), 'captured')
    assert not engine.captures(loop)
    engine.close()


def test_buffers_are_the_same_from_load_to_close():
    case = load_openvla_case(PATH)
    engine = TorchTokenEngine(case.network, max_rows=2)
    buffers = [value for answer in engine._answers.values() for value in vars(answer).values()]
    before = [tensor.data_ptr() for tensor in buffers]
    for request in case.requests:
        encode(engine, request)
        engine.use_prefix(1)
        write_answer(engine, case.network.dims.answer_length, None)
    now = [value for answer in engine._answers.values() for value in vars(answer).values()]
    assert [tensor.data_ptr() for tensor in now] == before
    engine.close()


@pytest.mark.parametrize('backend', ['torch', 'onnxruntime'])
def test_recorded_cases_and_repeated_answers(bundle: Path, backend: str):
    with closing(Policy.load(bundle, backend=backend)) as policy:
        check_recorded_cases(policy._engine, bundle, 'float32')
        chunks = {}
        for _ in range(2):
            policy.reset()
            for number, (observation, expected) in enumerate(observations()):
                chunk, report = policy.infer(observation)
                assert np.abs(chunk.actions[0] - expected).max() <= 1e-5
                assert report.runs['expert'] == len(expected) - 1
                assert np.array_equal(chunks.setdefault(number, chunk.actions), chunk.actions)


def test_packed_chunks_are_those_of_one_after_the_other(bundle: Path):
    packed = PolicySettings(pipeline='packed')
    with closing(Policy.load(bundle, backend='torch', settings=packed)) as policy:
        policy.warm_up()
        assert policy.open_requests(packed) == policy.spec.dims.action_dim
        seen, expected = zip(*observations(), strict=True)
        # The instruction stays: another one drops what is open.
        told = [replace(one, instruction=seen[0].instruction) for one in seen]
        alone = [policy.infer(one, settings=PolicySettings())[0].actions for one in (*told, *told)]
        policy.reset()
        futures = [policy.submit(one) for one in (*told, *told)]
        for number, (future, actions) in enumerate(zip(futures, alone, strict=True)):
            chunk, report = future.result()
            assert np.array_equal(chunk.actions, actions)
            assert (report.number, report.pipeline) == (number, 'packed')
            assert report.ticks == len(expected[0]) - 1
            assert report.age_ms >= report.milliseconds['denoise'] > 0
        assert report.answers_per_s is not None and report.answers_per_s > 0
        assert np.abs(alone[0][0] - expected[0]).max() <= 1e-5
        # Alone it takes as many ticks.
        chunk, report = policy.infer(seen[1])
        assert np.abs(chunk.actions[0] - expected[1]).max() <= 1e-5
        policy.reset()
        chunk, report = policy.infer(seen[1], settings=PolicySettings())
        assert report.number == 0 and np.abs(chunk.actions[0] - expected[1]).max() <= 1e-5


@pytest.mark.parametrize('backend', ['onnxruntime'])
def test_packed_requests_are_refused_by_name_where_they_cannot_be(bundle: Path, backend: str):
    policy = Policy.load(bundle, backend=backend)
    with closing(policy), pytest.raises(ValueError, match='packed'):
        policy.check(PolicySettings(pipeline='packed'))


def test_tensorrt_over_a_fake_device(bundle: Path, tmp_path: Path, monkeypatch):
    machine = Machine(monkeypatch, linked_copy(bundle, tmp_path / 'bundle'))
    machine.build(rows=1)
    with closing(Policy.load(machine.bundle, backend='tensorrt', device='cuda')) as policy:
        check_recorded_cases(policy._engine, machine.bundle, 'float32')
        for observation, expected in observations():
            chunk, report = policy.infer(observation)
            assert np.abs(chunk.actions[0] - expected).max() <= 1e-5
            assert report.cuda_graph['denoise'] == 'captured'
        # Answers of several robots, one after the other.
        seen, expected = zip(*observations(), strict=True)
        sessions = [policy.open_session() for _ in seen]
        requests = [Request(*one) for one in zip(seen, sessions, strict=True)]
        for reuse in (Reuse.MISS, Reuse.HIT):
            for (chunk, report), one in zip(policy.infer_batch(requests), expected, strict=True):
                assert np.abs(chunk.actions[0] - one).max() <= 1e-5
                assert report.cuda_graph['denoise'] == 'captured'
                assert report.cache.prefixes[0].reuse is reuse
    assert machine.cuda.live == (0, 0)


def test_passes_are_counted(bundle: Path):
    from vla_runtime.models.shapes.operation_counts import count_operations, counts_of

    spec = read_bundle(bundle).spec
    counts = count_operations(spec.family, spec.dims)
    assert counts == counts_of(read_bundle(bundle))
    work = counts.inference(steps=1)
    one = counts.step[1].work(4)
    assert counts.passes == spec.dims.action_dim - 1
    assert work['denoise'].weight_bytes == counts.passes * one.weight_bytes
    language = spec.dims.language
    # Every matrix of the language model is read in every pass, and one row of the text table.
    assert one.weight_bytes >= 4 * 12 * language.depth * language.width**2 // 2
