"""Policies of every family behind the server, on every backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx_bundles import tiny_onnx_bundle
from paths import ROOT
from policy_servers import Client, request, running, tiny_bundle, wait_for
from tensorrt_machine import Machine, write_exported_policy
from thorough import thorough_but
from tiny_policy import TINY_FAMILIES, tiny_spec

from vla_runtime.engines.tensorrt import loading as tensorrt_loading
from vla_runtime.remote.message_pack import pack, unpack
from vla_tools.serve.served_policy import ServeOptions


def asked(contract: dict[str, Any], look: int) -> dict[str, Any]:
    """A request made of the contract alone."""
    random = np.random.default_rng(look)
    images = {
        camera['name']: random.integers(
            0, 256, (camera['height'], camera['width'], 3), dtype=np.uint8
        )
        for camera in contract['cameras']
    }
    state = random.uniform(-0.5, 0.5, len(contract['state']))
    return {'observation': {'image': images, 'state': state}, 'prompt': 'touch the red block'}


def answers(bundle: Path, **options: Any) -> None:
    with running(bundle, **options) as server, Client(server.url) as client:
        told = client.metadata
        assert pack(unpack(pack(told))) == pack(told)
        for look in range(2):
            actions = client.actions(asked(told, look))
            assert actions.shape == (told['action_horizon'], len(told['actions']))
            assert np.isfinite(actions).all()
        if told['takes_noise']:
            noise = np.zeros(told['noise_shape'], np.float32)
            assert np.isfinite(client.actions({**asked(told, 0), 'noise': noise})).all()
        assert told['batch_exact'] is True


@pytest.mark.parametrize('family', thorough_but(('act', 'diffusion'), TINY_FAMILIES))
def test_the_contract_is_enough_to_ask(family: str, tmp_path: Path) -> None:
    answers(tiny_bundle(tmp_path / family, tiny_spec(family)))


@pytest.mark.parametrize('name', ['demo', 'demo_pi0_fast'])
def test_shipped_policies_are_served(name: str) -> None:
    answers(ROOT / 'engines' / name)


def test_onnx_runtime_serves_several_robots_one_after_the_other() -> None:
    with running(tiny_onnx_bundle(), backend='onnxruntime') as server:
        with Client(server.url) as one, Client(server.url) as other:
            first, second = one.ask(request(1)), other.ask(request(1))
            assert np.array_equal(first['actions'], second['actions'])
            assert first['vla_runtime']['together'] == 1
        assert server.served.metadata['batch_exact'] is True


@pytest.fixture
def on_tensorrt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """A machine with a GPU that other programs do not use, and engines of a tiny bundle."""
    monkeypatch.setattr(tensorrt_loading, 'LOAD_RESERVE_BYTES', 0)
    bundle = write_exported_policy(tmp_path / 'policy')
    here = Machine(monkeypatch, bundle, integrated=False)
    here.build()
    return here


def test_tensorrt_serves_several_robots_one_after_the_other(on_tensorrt: Machine) -> None:
    with running(on_tensorrt.bundle, backend='tensorrt') as server:
        with Client(server.url) as one, Client(server.url) as other:
            first, second = one.ask(request(1)), other.ask(request(2))
            assert not np.array_equal(first['actions'], second['actions'])
            assert first['vla_runtime']['together'] == 1
            # What one has seen is neither the other's nor lost to it.
            again = other.ask(request(1, number=0))
            assert again['vla_runtime']['cache_prefix'].startswith('miss')
            assert np.array_equal(again['actions'], first['actions'])
            one.ask({'endpoint': 'reset'})
            assert other.ask(request(1))['vla_runtime']['cache_prefix'].startswith('hit')
            assert one.ask(request(1))['vla_runtime']['cache_prefix'].startswith('miss')
        assert server.served.metadata['batch_exact'] is True
    assert on_tensorrt.cuda.live == (0, 0)


def test_a_robot_that_has_no_room_on_the_gpu_is_told_and_the_others_go_on(
    on_tensorrt: Machine,
) -> None:
    cuda = on_tensorrt.cuda
    options = ServeOptions(keep_s=0.0)
    with running(on_tensorrt.bundle, backend='tensorrt', options=options) as server:
        # One place is there, from the start of the server.
        cuda.total_bytes = cuda.used_bytes + server.served.session_bytes
        with Client(server.url) as one, Client(server.url) as late:
            with Client(server.url) as other:
                chunks = [client.actions(request(1)) for client in (one, other)]
                refused = late.ask(request(1))
                assert isinstance(refused, str) and 'Orin' in refused
                assert np.array_equal(one.actions(request(1, number=0)), chunks[0])
            # The place of one that has left.
            wait_for(lambda: len(server.served.sessions) == 2)
            assert np.array_equal(late.actions(request(1)), chunks[1])
