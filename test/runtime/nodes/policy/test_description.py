"""The description of a policy says what it ran on, and comes back as it was written."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from paths import ROOT
from tiny_policy import tiny_spec
from tiny_robot import write_robot

from vla_runtime.bundle.success import spec_identity
from vla_runtime.nodes.policy.description import (
    DescriptionError,
    Run,
    describe,
    find_description,
    read_description,
)
from vla_runtime.robot.file import load_robot
from vla_runtime.robot.match import match_robot

RUN = Run(
    bundle='/bundles/tiny',
    backend='torch',
    device='cpu',
    precision='float32',
    use_cuda_graphs=True,
    triton='on',
    threads=2,
)


def written(tmp_path, run: Run = RUN) -> str:
    spec, robot = tiny_spec(), load_robot(write_robot(tmp_path / 'tiny.yaml'))
    return describe(
        spec,
        robot,
        match_robot(robot, spec, 'tiny'),
        run,
        topic_name=lambda topic: f'/ns/{topic}',
    )


def test_the_same_policy_has_the_same_description(tmp_path):
    assert written(tmp_path) == written(tmp_path)
    assert 'load_1min' not in read_description(written(tmp_path)).machine


def test_a_server_is_named_with_its_own_machine(tmp_path):
    there = {'versions': {'torch': '9'}, 'machine': {'cpu': 'another'}, 'jpeg_quality': 80}
    found = read_description(written(tmp_path, replace(RUN, server='ws://box:8000', **there)))
    assert (found.server, found.jpeg_quality) == ('ws://box:8000', 80)
    assert (found.versions, found.machine) == (there['versions'], there['machine'])
    assert read_description(written(tmp_path)).server == ''


def test_it_comes_back(tmp_path):
    found = read_description(written(tmp_path))
    assert found.bundle_sha256 == spec_identity(tiny_spec())
    assert (found.bundle.name, found.bundle_name) == ('tiny', 'tiny pi05')
    assert (found.backend, found.device, found.precision) == ('torch', 'cpu', 'float32')
    assert (found.threads, found.use_cuda_graphs) == (2, True)
    assert (found.triton, found.compiled) == ('on', '')
    assert found.cameras == {'top': '/ns/top/image', 'wrist': '/ns/wrist/image'}
    assert found.joint_states == ('/ns/joint_states', '/ns/gripper/joint_states')
    assert (found.committed_plan, found.action_chunk) == ('/ns/committed_plan', '/ns/action_chunk')
    assert found.step_time_s == tiny_spec().step_time_s
    earlier = json.loads(written(tmp_path))
    del earlier['step_time_s']
    assert read_description(json.dumps(earlier)).step_time_s is None
    assert found.robot.joints == load_robot(tmp_path / 'tiny.yaml').joints
    assert found.robot.text == (tmp_path / 'tiny.yaml').read_text()
    assert {'python', 'numpy'} <= set(found.versions)


@pytest.mark.parametrize(
    ('word', 'triton', 'compiled'),
    [
        (None, 'off', ''),
        ('none', 'off', ''),
        ('triton', 'on', ''),
        ('vision+triton', 'on', 'vision'),
        ('vision+denoise', 'off', 'vision+denoise'),
        ('all', 'off', 'vision+prefix+denoise'),
    ],
)
def test_one_from_before_the_option_triton_is_read(word, triton, compiled, tmp_path):
    older = json.loads(written(tmp_path))
    del older['triton']
    if word is not None:
        older['torch_compile'] = word
    found = read_description(json.dumps(older))
    assert (found.triton, found.compiled) == (triton, compiled)


@pytest.mark.parametrize(
    ('change', 'words'),
    [
        ({'format': 1}, 'field format'),
        ({'state_scale': [1.0]}, 'field state_scale'),
        ({'threads': 'two'}, 'field threads'),
        ({'cameras': {'top': 3}}, 'field cameras'),
    ],
)
def test_what_is_damaged_is_named(tmp_path, change, words):
    with pytest.raises(DescriptionError, match=words):
        read_description(json.dumps(json.loads(written(tmp_path)) | change))


@pytest.mark.parametrize('text', ['', '{', '[1]', '[' * 100_000])
def test_what_is_no_description_is_refused(text):
    with pytest.raises(DescriptionError):
        read_description(text)


def test_the_policy_node_of_a_bag_is_the_one_with_a_description(tmp_path):
    text, noted = written(tmp_path), []
    said = [(0, '/other/description', 'hello'), (1, '/vla_policy/description', text)]
    found = find_description([*said, said[1]], None, noted.append)
    assert found == read_description(text)
    assert noted == ['topic /other/description: the description is no JSON']
    assert find_description(said[:1], None, noted.append) is None


def test_of_several_policy_nodes_the_namespace_says_which(tmp_path):
    text = written(tmp_path)
    said = [(0, '/left/p/description', text), (1, '/vla_policy/description', text)]
    with pytest.raises(DescriptionError):
        find_description(said, None, print)
    for namespace in ('left', '/left/', '/', ''):
        assert find_description(said, namespace, print) == read_description(text)
    with pytest.raises(DescriptionError, match='--namespace'):
        find_description(said, 'lab', print)


def test_what_a_replay_needs_of_the_node_imports_no_ros_2():
    code = (
        'import sys\n'
        'import vla_runtime.nodes.policy.description\n'
        'import vla_runtime.nodes.policy.robot_policy\n'
        'import vla_runtime.nodes.policy.settings\n'
        'import vla_runtime.messages.diagnostics\n'
        'roots = {name.split(".")[0] for name in sys.modules}\n'
        'print([r for r in roots if r.startswith("rcl") or r.endswith(("_msgs", "_interfaces"))])'
    )
    done = subprocess.run(
        [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == '[]'
