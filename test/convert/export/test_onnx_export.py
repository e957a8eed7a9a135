"""The exported files: their names and shapes, one copy of the weights, and the graph rewrites."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
import torch
from onnx_bundles import copy_bundle, load_graph, make_exports_once, tiny_onnx_bundle
from paths import ROOT
from tiny_policy import tiny_spec, write_tiny_policy
from torch import Tensor, nn
from torch.nn import functional as F

from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.export.onnx.bundle import export_bundle
from vla_convert.export.onnx.export import onnx_bytes, write_onnx
from vla_convert.export.onnx.graph import GraphWriter
from vla_convert.export.onnx.operators import lowering
from vla_convert.export.onnx.tracing import trace
from vla_convert.export.onnx.translation import Translator
from vla_runtime.bundle.folder import BundleError, read_bundle
from vla_runtime.bundle.onnx_files import (
    IMAGE_INPUTS,
    ONNX_FOLDER,
    STEP_INPUTS,
    STEP_OUTPUTS,
    WEIGHTS_DATA,
    graph_names,
)
from vla_runtime.bundle.writer import seal
from vla_runtime.family.dimensions import DecoderDims, VisionDims


def ports(values) -> dict[str, tuple[str, list[int]]]:
    """Names of inputs or outputs to type and shape."""
    return {
        value.name: (
            onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type),
            [dim.dim_value for dim in value.type.tensor_type.shape.dim],
        )
        for value in values
    }


@pytest.mark.parametrize('family', ['pi05', 'pi0'])
def test_every_file_is_valid_and_has_the_designs_names_in_static_shapes(family):
    bundle = tiny_onnx_bundle(family)
    dims = read_bundle(bundle).spec.dims
    state = dims.state_dim > 0
    past = [2, 2, 1, dims.prefix_length, 8]
    found = {}
    for name in graph_names():
        onnx.checker.check_model(str(bundle / ONNX_FOLDER / name), full_check=True)
        graph = load_graph(bundle, name).graph
        found[name] = ports(graph.input), ports(graph.output)
        for _, shape in (*found[name][0].values(), *found[name][1].values()):
            assert all(shape), 'a dimension is not static'
    vision_in, vision_out = found['vision.onnx']
    assert vision_in == {'pixels': ('FLOAT', [1, 3, 28, 28])}
    assert vision_out == {'image_tokens': ('FLOAT', [1, 4, 32])}
    prefix_in, prefix_out = found['prefix_r2.onnx']
    assert list(prefix_in) == [*IMAGE_INPUTS, 'token_mask', 'text_embeddings']
    assert prefix_in['text_embeddings'] == ('FLOAT', [2, 64, 32])
    assert prefix_in['image_mask'] == ('BOOL', [2])
    assert prefix_out == {
        'past_key': ('FLOAT', past),
        'past_value': ('FLOAT', past),
        'prefix_mask': ('BOOL', [2, dims.prefix_length]),
    }
    expert_in, expert_out = found['expert_r2.onnx']
    head = ['state'] if state else []
    assert list(expert_in) == ['x', *prefix_out, *STEP_INPUTS, *head]
    assert list(expert_out) == list(STEP_OUTPUTS)
    assert expert_out['velocity'] == ('FLOAT', [2, 8, 6])
    assert {name: expert_in[name] for name in prefix_out} == prefix_out
    assert found['expert.onnx'][0]['past_key'] == ('FLOAT', [2, 1, *past[2:]])
    monolithic_in, monolithic_out = found['monolithic.onnx']
    assert monolithic_in['plan_weight'] == ('FLOAT', [3, 1, 8, 1])
    assert list(monolithic_out) == ['x_next']


@pytest.mark.parametrize('precision', ['float32', 'float16'])
def test_all_graphs_share_one_copy_of_the_weights(precision):
    bundle = tiny_onnx_bundle('pi05', precision)
    folder, places = bundle / ONNX_FOLDER, {}
    for name in graph_names():
        for tensor in load_graph(bundle, name).graph.initializer:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                entries = {entry.key: entry.value for entry in tensor.external_data}
                assert entries['location'] == WEIGHTS_DATA
                places[int(entries['offset'])] = int(entries['length'])
            else:
                assert tensor.ByteSize() < 2048, f'{name}: {tensor.name} stands in the graph'
    # Every byte of the file belongs to a tensor that a graph names, but for the alignment.
    assert (folder / WEIGHTS_DATA).stat().st_size <= sum(places.values()) + 4096 * len(places)
    weights = onnx_bytes(read_bundle(bundle).spec, precision)
    assert 0.9 * weights <= sum(places.values()) <= 1.1 * weights


def test_linear_layers_over_one_tensor_are_one_product_and_the_last_prefix_layer_stops_at_values():
    names = {t.name for t in load_graph(tiny_onnx_bundle(), 'prefix.onnx').graph.initializer}
    block = 'language.blocks.0'
    assert f'{block}.mlp.gate.weight+{block}.mlp.up.weight' in names
    assert '+'.join(f'{block}.attention.{part}.weight' for part in 'qkv') in names
    last = {name for name in names if 'language.blocks.1' in name}
    block = 'language.blocks.1'
    assert {f'{block}.attention.k.weight+{block}.attention.v.weight'} == {
        name for name in last if not name.startswith('constant')
    }


def test_attentions_scale_is_in_the_query_weights():
    bundle = tiny_onnx_bundle()
    model = onnx.load(bundle / ONNX_FOLDER / 'prefix.onnx')
    name = '+'.join(f'language.blocks.0.attention.{part}.weight' for part in 'qkv')
    (merged,) = (t for t in model.graph.initializer if t.name == name)
    from safetensors.torch import load_file

    weights = load_file(bundle / 'weights.safetensors')
    queries = weights['language.blocks.0.attention.q.weight'].T / 8**0.5
    stored = torch.from_numpy(onnx.numpy_helper.to_array(merged).copy())
    torch.testing.assert_close(stored[:, : queries.shape[1]], queries)


def test_an_operator_without_an_onnx_form_is_named():
    with pytest.raises(ExportError, match=r"'fft_rfft\.default'.*onnx/operators"):
        lowering('fft_rfft.default')


class Listed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tensor([1.0, 2.0], device=x.device)


class Buffered(nn.Module):
    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer('factors', torch.tensor([1.0, 2.0]), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factors


@pytest.mark.parametrize(
    ('make', 'name'),
    [
        (Listed, r"'1' \(.*Listed\).*shape \[2\] \('_tensor_constant0'\)"),
        (lambda: Buffered(True), r"'1' \(.*Buffered\).*shape \[2\] \('1\.factors'\)"),
        (lambda: Buffered(False), r"'1' \(.*Buffered\).*shape \[2\] \('1\.factors'\)"),
    ],
    ids=['from a list', 'in a buffer', 'in a buffer that is not saved'],
)
def test_a_constant_whose_numbers_are_not_known_is_refused_by_its_module(make, name):
    with torch.device('meta'):
        network = nn.Sequential(nn.ReLU(), make())
    traced = trace(network, torch.zeros(3, 2, device='meta'))
    # Refused before the first weight is written.
    graph = GraphWriter('refused', None)  # type: ignore[arg-type]
    x = graph.input('x', torch.float32, (3, 2))
    with pytest.raises(ExportError, match=f'the network module {name}.*torch\\.arange'):
        Translator(graph, SimpleNamespace(names=()), {}).write(traced, '', [x])


def test_a_tensor_that_a_module_keeps_from_an_earlier_trace_is_a_constant_of_the_next():
    class Keeping(nn.Module):
        kept: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.kept is None:
                self.kept = torch.arange(2, device=x.device).float()
            return x * self.kept

    module, x = Keeping(), torch.zeros(2, device='meta')
    assert not trace(module, x).constants
    assert list(trace(module, x).constants) == ['_tensor_constant0']


def test_a_constant_that_forward_writes_into_is_kept_as_it_was_made():
    class Written(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            factors = torch.tensor([1.0, 2.0])
            factors.add_(factors.sum().item())
            return x, factors

    (constant,) = trace(Written(), torch.zeros(2, device='meta')).constants.values()
    assert constant.tolist() == [1.0, 2.0]


def test_an_operator_is_lowered_as_pytorch_computes_it():
    # What the reference cases reach only together: here one network of odd sizes, all at once.
    import onnxruntime

    class Weights:
        def constant(self, name, value):
            return onnx.numpy_helper.from_array(value.numpy(), name)

    graph = GraphWriter('operators', Weights())  # type: ignore[arg-type]
    x = graph.input('x', torch.float32, (2, 3, 5))
    numbers = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    expected = {
        'gelu': F.gelu(numbers, approximate='tanh'),
        'silu': F.silu(numbers),
        'square': numbers.square(),
        'rsqrt': numbers.square().rsqrt(),
        'mean': numbers.mean(dim=-1, keepdim=True),
        'rms_norm': F.rms_norm(numbers, (5,)),
        'rms_norm_eps': F.rms_norm(numbers, (5,), eps=0.5),
        'slice': numbers[:, 1:, :],
        'select': numbers[:, -1],
        'repeat': numbers.repeat(1, 2, 3),
        'repeat_each': numbers.repeat_interleave(4, dim=1),
    }
    squared = lowering('square.default')(graph, expected['square'], x)
    found = {
        'square': squared,
        'rsqrt': lowering('rsqrt.default')(graph, expected['rsqrt'], squared),
        'mean': lowering('mean.dim')(graph, expected['mean'], x, [-1], True),
        'gelu': lowering('gelu.default')(graph, expected['gelu'], x, approximate='tanh'),
        'silu': lowering('silu.default')(graph, expected['silu'], x),
        'rms_norm': lowering('rms_norm.default')(graph, expected['rms_norm'], x, [5]),
        'rms_norm_eps': lowering('rms_norm.default')(
            graph, expected['rms_norm_eps'], x, [5], None, 0.5
        ),
        'slice': lowering('slice.Tensor')(graph, expected['slice'], x, 1, 1, 2**63 - 1),
        'select': lowering('select.int')(graph, expected['select'], x, 1, -1),
        'repeat': lowering('repeat.default')(graph, expected['repeat'], x, [1, 2, 3]),
        'repeat_each': lowering('repeat_interleave.self_int')(
            graph, expected['repeat_each'], x, 4, 1
        ),
    }
    for name, value in found.items():
        graph.output(name, value)
    session = onnxruntime.InferenceSession(graph.model().SerializeToString())
    outputs = session.run(list(expected), {'x': numbers.numpy()})
    for (name, value), output in zip(expected.items(), outputs, strict=True):
        torch.testing.assert_close(torch.from_numpy(output), value, msg=name)


def test_a_bundle_gets_files_in_another_precision_and_keeps_its_receipt(tmp_path, monkeypatch):
    make_exports_once(monkeypatch)
    source = copy_bundle(tiny_onnx_bundle(), tmp_path / 'source')
    (source / 'verification.json').write_text(json.dumps({'made': 'by hand'}))
    seal(source, read_bundle(tiny_onnx_bundle()).spec)
    made = export_bundle(read_bundle(source), tmp_path / 'half', 'float16')
    receipt = json.loads((made.folder / 'verification.json').read_text())
    assert receipt['made'] == 'by hand'
    assert receipt['onnx']['precision'] == 'float16'
    assert set(graph_names()) <= {Path(name).name for name in made.spec.files}
    # In place of itself, with force alone.
    with pytest.raises(BundleError, match='--force'):
        export_bundle(read_bundle(source), source, 'float16')
    replaced = export_bundle(read_bundle(source), source, 'float16', force=True)
    assert read_bundle(replaced.folder).spec.files == made.spec.files


_WITHIN = """
import sys
from pathlib import Path
from vla_runtime.bundle.folder import read_bundle
from vla_convert.export.onnx.bundle import add_onnx
import onnxruntime, torch, vla_convert.export.onnx.verification
from vla_convert.export.onnx.tracing import trace
trace(torch.nn.Linear(2, 2, device='meta'), torch.zeros(1, 2, device='meta'))
spec = read_bundle(sys.argv[1]).spec
def peak():
    # Not getrusage: a child's ru_maxrss begins at its parent's peak.
    lines = Path('/proc/self/status').read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith('VmHWM'))
before = peak()
add_onnx(Path(sys.argv[1]), spec, 'float32')
print(peak() - before)
"""


@pytest.mark.thorough
def test_the_export_and_its_comparison_need_no_second_copy_of_the_weights(tmp_path):
    """Reduced depth at a real width: what it takes is measured against the weights' bytes."""
    language = DecoderDims(
        width=1024, depth=2, mlp_dim=4096, num_heads=4, num_kv_heads=1, head_dim=128
    )
    spec = tiny_spec()
    dims = replace(
        spec.dims,
        vision=VisionDims(
            width=512, depth=1, num_heads=4, mlp_dim=2048, patch_size=14, image_size=28
        ),
        language=language,
        expert=replace(language, width=768, mlp_dim=3072),
        vocabulary=4000,
        prompt_length=16,
    )
    bundle = write_tiny_policy(tmp_path / 'wide', replace(spec, dims=dims, denoise_steps=2))
    command = [sys.executable, '-c', _WITHIN, str(bundle)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    weights = (bundle / 'weights.safetensors').stat().st_size
    assert weights > 200e6
    # The file is read whole and compared: a measurement that says less measures nothing.
    assert int(done.stdout) >= 0.2 * weights
    assert int(done.stdout) <= 1.5 * weights, f'{int(done.stdout) / weights:.2f} of the weights'


def test_nothing_is_written_where_the_disk_is_too_small(tmp_path, monkeypatch):
    import shutil
    from collections import namedtuple

    usage = namedtuple('usage', 'total used free')
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage(1, 1, 1000))
    with pytest.raises(ExportError, match='disk'):
        export_bundle(read_bundle(tiny_onnx_bundle()), tmp_path / 'made', 'float32')
    assert list(tmp_path.iterdir()) == []


def test_the_same_export_gives_the_same_bytes(tmp_path):
    first, spec = tiny_onnx_bundle(), read_bundle(tiny_onnx_bundle()).spec
    again = write_tiny_policy(tmp_path / 'again', tiny_spec(advantage='task_newline'))
    write_onnx(again, spec, 'float32')
    for name in (*graph_names(), WEIGHTS_DATA):
        assert (again / ONNX_FOLDER / name).read_bytes() == (
            first / ONNX_FOLDER / name
        ).read_bytes()
