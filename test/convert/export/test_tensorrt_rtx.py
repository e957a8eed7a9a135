"""Every family's graphs through TensorRT for RTX's own parser and builder, without a GPU.

What is compiled is read from the builder's log, and held to benchmark/results/tensorrt_rtx.json.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import int8_bundles as faults
import nvfp4_bundles as nvfp4_faults
import onnx
import pytest
import torch
from family_contracts import contract_of
from network_cases import network_case_paths, random_network
from onnx import TensorProto, helper
from onnx_bundles import copy_weights, onnx_of_network, tiny_onnx_bundle
from paths import ROOT
from rtx_plans import (
    FAMILIES,
    GRAPHS,
    PRECISIONS,
    adapter,
    bindings,
    build,
    needs_rtx,
    targets_of,
    tiny_graphs,
    uncalibrated,
    unplanned,
    wrong_products,
)
from safetensors.torch import save_file
from tensorrt_machine import write_exported_policy
from thorough import thorough_but
from tiny_policy import tiny_dims, tiny_spec

from vla_convert.export.onnx.bundle import FUSED_HEADS
from vla_convert.export.onnx.eight_bits import EightBits
from vla_convert.export.onnx.export import write_onnx
from vla_convert.export.onnx.quantised_products import Matrix
from vla_convert.export.onnx.translation import _Translation as Translation
from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.onnx_files import ONNX_FOLDER
from vla_runtime.bundle.schema import WEIGHTS_FILE, CameraSpec
from vla_runtime.cli.main import main
from vla_runtime.engines.cuda_runtime import DeviceInfo
from vla_runtime.engines.tensorrt.adapter import BuildOptions, TensorRT, TensorRTError
from vla_runtime.engines.tensorrt.kernel_plan import Kernel, Operand, count_products, mixed_products
from vla_runtime.engines.tensorrt.layer_types import sum_in_float32
from vla_runtime.engines.tensorrt.rtx import RTX_MODULES, check_targets
from vla_runtime.engines.tensorrt.store import METADATA, find_engines

pytestmark = needs_rtx
RECORD = ROOT / 'benchmark' / 'results' / 'tensorrt_rtx.json'
# Two graphs of two families stand for all where every change is tested.
QUICK = [('pi05', 'bfloat16'), ('pi05', 'int8'), ('pi05', 'fp8'), ('pi05', 'nvfp4')]


@pytest.mark.parametrize(
    ('family', 'precision'),
    thorough_but(QUICK, [(family, precision) for family in FAMILIES for precision in PRECISIONS]),
)
def test_a_plan_multiplies_in_the_types_of_the_file(family, precision):
    for name in GRAPHS:
        path = tiny_graphs(family, precision) / name
        for lengths in ((1,),) if name == 'vision.onnx' else ((1,), (1, 2)):
            built = build(path, lengths, targets_of(precision))
            assert wrong_products(path, built.kernels) == []
            assert unplanned(path, built.kernels) == set()
            record = recorded(family, precision, name, lengths[-1])
            # Nothing has fallen apart, and no matrix is stored twice.
            assert len(built.kernels) <= record['kernels']
            assert len(built.plan) <= 1.02 * record['bytes']


@pytest.mark.parametrize(('network', 'name'), [('vision', GRAPHS[0]), ('language', GRAPHS[1])])
def test_ternary_weights_are_multiplied_in_8_bits(network, name):
    path = tiny_graphs('bitvla', 'float32') / name
    kernels = build(path).kernels
    assert wrong_products(path, kernels) == []
    assert unplanned(path, kernels) == set()
    rounded = {
        one for kernel in kernels if kernel.factors == ('int8', 'int8') for one in kernel.products
    }
    # Queries, keys and values are one product, and so are gate and up.
    assert len(rounded) == 4 * getattr(tiny_dims('bitvla'), network).depth


def recorded(family: str, precision: str, name: str, rows: int) -> dict:
    plans = json.loads(RECORD.read_text())['figures']['plans']
    key = {'family': family, 'precision': precision, 'graph': name, 'rows': rows}
    key['targets'] = list(targets_of(precision))
    (plan,) = (plan for plan in plans if plan.items() >= key.items())
    return plan


@pytest.mark.thorough
@pytest.mark.cases
@pytest.mark.parametrize('precision', ['float32', 'bfloat16'])
@pytest.mark.parametrize(
    ('family', 'case'),
    [
        pytest.param(family, path, id=f'{family}-{path.stem}')
        for family in FAMILIES
        for path in network_case_paths(contract_of(family).kind or family)
    ],
)
def test_every_reference_case_is_built(family, case, precision):
    with torch.inference_mode():
        network = contract_of(family).case(case, 0).network
    cameras = tuple(CameraSpec(f'camera_{n}') for n in range(network.dims.cameras))
    bundle = onnx_of_network(family, network, precision, cameras=cameras)[0]
    for graph in GRAPHS:
        path = bundle / ONNX_FOLDER / graph
        built = build(path)
        assert wrong_products(path, built.kernels) == []
        assert unplanned(path, built.kernels) == set()


@pytest.fixture(scope='module')
def wide(tmp_path_factory) -> Path:
    """Graphs of a pi0.5 whose gate and up matrices outweigh all code of a plan."""
    dims = tiny_dims('pi05')
    language = replace(dims.language, depth=2, width=256, mlp_dim=4096)
    dims = replace(dims, language=language)
    return onnx_of_network('pi05', random_network('pi05', dims), 'bfloat16')[0] / ONNX_FOLDER


class ProfileEachLength(TensorRT):
    """The adapter with a profile for each length, as TensorRT 8.6 needs them."""

    def _add_profiles(self, builder, config, network, lengths) -> None:
        for length in lengths:
            super()._add_profiles(builder, config, network, (length,))


def test_a_plan_for_one_and_two_rows_stores_each_matrix_once(wide):
    path = wide / 'prefix_rows.onnx'
    layers, gate_and_up = 2, 2 * 256 * 4096 * 2
    # The last layer hands on keys and values alone, and has no MLP.
    stored_twice = (layers - 1) * gate_and_up
    one, both = (len(build(path, lengths, ('sm89',)).plan) for lengths in ((1,), (1, 2)))
    assert both - one < stored_twice / 2
    with_two = len(build(path, (1, 2), ('sm89',), ProfileEachLength(adapter()._trt)).plan)
    assert with_two - one > stored_twice / 2


@pytest.mark.thorough
@pytest.mark.parametrize('name', GRAPHS)
def test_casts_for_sums_in_float32_change_no_plan(name):
    """So TensorRT for RTX gets none: its plans do not say how a product is added up."""

    class WithCasts(TensorRT):
        def _configure(self, config, network, options) -> dict[str, int]:
            sum_in_float32(self._trt, network)
            return super()._configure(config, network, options)

    path = tiny_graphs('pi05', 'float16') / name
    without = build(path, (1,), ('sm89',))
    cast = build(path, (1,), ('sm89',), WithCasts(adapter()._trt))
    assert cast.layers > without.layers
    assert count_products(cast.kernels) == count_products(without.kernels)
    assert len(cast.kernels) == len(without.kernels)


FUSED = ('sm89', 'sm120')
HALVES = ('bfloat16', 'float16')


@pytest.fixture(scope='module')
def fused(tmp_path_factory):
    """Return a function that writes a tiny policy's graphs with attention as one operator."""

    def write(family: str, precision: str) -> Path:
        dims = tiny_dims(family)
        # The kernel has no heads of 8 numbers.
        parts = {part: getattr(dims, part) for part in HEADED[family]}
        dims = replace(dims, **{k: replace(v, head_dim=16) for k, v in parts.items()})
        if family == 'evo1':
            dims = replace(dims, head=replace(dims.head, num_heads=2))
        if family == 'act':
            stacks = {part: getattr(dims, part) for part in ('encoder', 'decoder')}
            dims = replace(dims, **{k: replace(v, width=48) for k, v in stacks.items()})
        folder = tmp_path_factory.mktemp('fused') / 'policy'
        folder.mkdir()
        network = random_network(family, dims)
        save_file(
            {k: v.contiguous() for k, v in network.state_dict().items()}, folder / WEIGHTS_FILE
        )
        write_onnx(folder, replace(tiny_spec(family), dims=dims), precision, attention='fused')
        return folder / ONNX_FOLDER

    return write


# Parts of a family whose heads have a size of their own.
HEADED = {
    'pi05': ('language', 'expert'),
    'pi0': ('language', 'expert'),
    'smolvla': ('language', 'expert'),
    'evo1': ('language',),
    'act': (),
    'groot_n15': ('language', 'context', 'dit'),
    'groot_n16': ('language', 'dit'),
    'groot_n17': ('language', 'context', 'dit'),
}


@pytest.mark.parametrize(
    ('family', 'precision'),
    thorough_but([('pi05', 'bfloat16')], [(family, half) for family in HEADED for half in HALVES]),
)
def test_fused_attention_is_one_kernel_a_block(fused, family, precision):
    folder = fused(family, precision)
    for name in GRAPHS:
        nodes = onnx.load(folder / name, load_external_data=False).graph.node
        blocks = sum(node.op_type == 'Attention' for node in nodes)
        for target in FUSED:
            kernels = build(folder / name, (1, 2), (target,)).kernels
            assert sum('mha' in kernel.name for kernel in kernels) == blocks
            # No product of queries and keys is left beside them.
            computed = {node for kernel in kernels for node in kernel.nodes}
            assert sum(node.startswith('Attention') for node in computed) == blocks


@pytest.mark.parametrize('kind', [TensorProto.BFLOAT16, TensorProto.FLOAT16])
@pytest.mark.parametrize('target', ['sm86', *FUSED])
def test_export_knows_the_heads_that_have_a_fused_kernel(tmp_path, kind, target):
    least, most = FUSED_HEADS

    def kernels(size: int) -> list[Kernel]:
        shapes = {'x': ['B', 3, 5, size], 'y': ['B', 3, 9, size]}
        ports = {
            name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name, shape in {**shapes, 'z': shapes['x']}.items()
        }
        nodes = [
            helper.make_node('Cast', ['x'], ['q'], to=kind),
            helper.make_node('Cast', ['y'], ['k'], to=kind),
            helper.make_node('Attention', ['q', 'k', 'k'], ['a'], scale=1.0),
            helper.make_node('Cast', ['a'], ['z'], to=TensorProto.FLOAT),
        ]
        graph = helper.make_graph(nodes, 'vision', [ports['x'], ports['y']], [ports['z']])
        path = tmp_path / f'{size}.onnx'
        opset = helper.make_opsetid('', 23)
        onnx.save_model(helper.make_model(graph, opset_imports=[opset], ir_version=11), path)
        return (
            adapter()
            .build(path, BuildOptions(reduced=True, lengths=(1,), targets=(target,)))
            .kernels
        )

    for size in (least, most):
        assert sum('mha' in kernel.name for kernel in kernels(size)) == 1
    for size in (least - 1, most + 1):
        with pytest.raises(TensorRTError):
            kernels(size)


@pytest.mark.parametrize(
    ('precision', 'lacking', 'able', 'words'),
    [('fp8', 'sm86', 'sm89', '8-bit'), ('nvfp4', 'sm89', 'sm120', '4-bit')],
)
def test_a_card_that_does_not_multiply_a_precision_is_refused_by_name(
    precision, lacking, able, words
):
    check_targets((able,), precision)
    refusal = f"target '{lacking}': has no products in {words} floating point"
    with pytest.raises(ValueError, match=refusal):
        check_targets((lacking, able), precision)


def test_the_library_itself_builds_4_bits_for_no_older_card():
    """What is refused by name would fail, and after minutes for a large policy."""
    path = tiny_graphs('pi05', 'nvfp4') / 'prefix_rows.onnx'
    with pytest.raises(TensorRTError, match='fp4'):
        build(path, (1,), ('sm89',))


def test_4_bits_are_4_bits_times_4_bits_in_the_plan():
    for family, name, products in (
        ('pi05', 'prefix_rows.onnx', 2),
        ('groot_n17', 'vision.onnx', 12),
    ):
        path = tiny_graphs(family, 'nvfp4') / name
        counts = count_products(build(path, (1, 2), ('sm120',)).kernels)
        assert counts['fp4 x fp4'] == products
        assert not [pair for pair in counts if 'fp4' in pair and pair != 'fp4 x fp4']


def test_the_last_product_of_an_mlp_is_8_bits_times_8_bits_beside_4(tmp_path):
    folder = nvfp4_faults.nvfp4_bundle(tmp_path, 'bfloat16', mlp_dim=80) / ONNX_FOLDER
    path = folder / 'prefix_rows.onnx'
    built = build(path, (1, 2), ('sm120',))
    counts = count_products(built.kernels)
    assert (counts['fp4 x fp4'], counts['fp8 x fp8']) == (1, 1)
    assert wrong_products(path, built.kernels) == [] and unplanned(path, built.kernels) == set()


@pytest.mark.parametrize('family', thorough_but(['pi05'], ['pi05', 'smolvla', 'groot_n17']))
def test_int8_is_int8_times_int8_in_the_vision_tower_too(family):
    counts = count_products(build(tiny_graphs(family, 'int8') / 'vision.onnx').kernels)
    assert counts['int8 x int8'] >= 4
    assert not [pair for pair in counts if 'int8' in pair and pair != 'int8 x int8']


def test_queries_keys_and_values_as_one_int8_product_are_refused(monkeypatch, tmp_path):
    """The form before: only the plan shows that one factor is widened."""
    together: list[Matrix] = []
    joined = Translation._joined

    def remembered(self, weights, transposed):
        matrix = joined(self, weights, transposed)
        if len(weights) > 1:
            together.append(matrix)
        return matrix

    class OneMatrix(EightBits):
        def products(self, graph, x, name, matrices):
            whole = [matrix for matrix in together if matrix.name == name]
            return super().products(graph, x, name, whole[-1:] or matrices)

    monkeypatch.setattr(Translation, '_joined', remembered)
    folder = tmp_path / 'bundle'
    folder.mkdir()
    source = tiny_onnx_bundle('pi05')
    copy_weights(source, folder)
    spec = read_bundle(source, verify=False).spec
    write_onnx(folder, spec, 'int8', quantised=OneMatrix(uncalibrated(source), 'bfloat16'))
    path = folder / ONNX_FOLDER / 'vision.onnx'
    with pytest.raises(TensorRTError):
        build(path)


@pytest.mark.parametrize(
    ('precision', 'fault'),
    [
        ('int8', faults.zero_point_of_one),
        ('int8', faults.input_that_is_not_rounded),
        ('int8', faults.scale_of_zero),
        ('nvfp4', nvfp4_faults.input_that_is_not_rounded),
        ('nvfp4', nvfp4_faults.blocks_of_32),
        ('nvfp4', nvfp4_faults.blocks_along_the_columns),
        ('nvfp4', nvfp4_faults.scales_of_another_input),
    ],
)
def test_a_planted_fault_is_refused_by_the_library_too(precision, fault, tmp_path):
    folder = shutil.copytree(tiny_graphs('pi05', precision), tmp_path / 'onnx')
    model = onnx.load(folder / 'prefix_rows.onnx', load_external_data=False)
    fault(model, folder)
    onnx.save_model(model, folder / 'prefix_rows.onnx')
    with pytest.raises(TensorRTError):
        build(folder / 'prefix_rows.onnx', (1,), targets_of(precision))


def test_turing_is_refused_by_name():
    with pytest.raises(ValueError, match="'sm75'"):
        build(tiny_graphs('pi05', 'float32') / 'vision.onnx', targets=('sm75',))
    with pytest.raises(ValueError, match="target 'sm87'"):
        build(tiny_graphs('pi05', 'float32') / 'vision.onnx', targets=('sm87',))


def test_what_cannot_be_parsed_is_named_by_the_real_parser(tmp_path):
    (tmp_path / 'graph.onnx').write_bytes(b'no graph')
    with pytest.raises(TensorRTError, match=r'graph\.onnx'):
        adapter().build(tmp_path / 'graph.onnx', BuildOptions(targets=('sm89',)))


def test_a_warning_is_told_once(caplog):
    path = tiny_graphs('act', 'float32') / 'expert_rows.onnx'
    adapter()._logger._warned.clear()
    with caplog.at_level(logging.DEBUG):
        for _ in range(2):
            build(path, (1,), ('sm89',))
    told = [record.getMessage() for record in caplog.records if record.levelname == 'WARNING']
    assert told and len(told) == len(set(told))


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize('at', ['the log of the parser', 'a step of the build'])
def test_a_signal_stops_a_build(number, at):
    """The real library swallows what its callbacks raise."""
    path = tiny_graphs('groot_n17', 'bfloat16') / 'expert_rows.onnx'
    script = f"""
import os, signal, sys
from pathlib import Path
sys.path[:0] = [{str(ROOT / 'test')!r}]
from vla_runtime.engines.tensorrt.adapter import BuildOptions
from rtx_plans import adapter
from vla_runtime.cli.main import _Ended

def ended(number, frame):
    raise _Ended(number) if number == signal.SIGTERM else KeyboardInterrupt

for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, ended)
real = adapter()
steps = []
log = type(real._logger).log

def signalled(self, severity, msg):
    os.kill(os.getpid(), {int(number)})
    type(self).log = log
    log(self, severity, msg)

def step(phase, done, total):
    if not steps:
        os.kill(os.getpid(), {int(number)})
    steps.append(phase)
    return True

if {at!r} == 'the log of the parser':
    type(real._logger).log = signalled
try:
    real.build(Path({str(path)!r}), BuildOptions(lengths=(1, 2), targets=('sm89',), progress=step))
except KeyboardInterrupt as error:
    print(type(error).__name__, len(steps), len(real._logger.layers))
"""
    done = subprocess.run(
        [sys.executable, '-c', script], cwd=ROOT, capture_output=True, text=True, env=os.environ
    )
    name, steps, compiled = done.stdout.split() or pytest.fail(done.stderr)
    assert name == ('_Ended' if number == signal.SIGTERM else 'KeyboardInterrupt')
    assert int(steps) == (0 if at == 'the log of the parser' else 1)
    assert compiled == '0'
    assert 'Exception caught in log' not in done.stdout + done.stderr


def test_a_product_of_one_small_factor_is_noticed_in_a_plan():
    def kernel(*dtypes: str) -> Kernel:
        left, right = Operand(dtypes[0], (1, 8, 16)), Operand(dtypes[1], (1, 16, 32))
        out = Operand('float32', (1, 8, 32))
        return Kernel('gemm', 'gemm', (left, right), (out,), ('MatMul_1',))

    assert mixed_products([kernel('int8', 'int8'), kernel('bfloat16', 'bfloat16')]) == []
    assert mixed_products([kernel('int8', 'float32')]) == ['MatMul_1']
    assert mixed_products([kernel('fp8', 'int8'), kernel('fp8', 'bfloat16')]) == ['MatMul_1']


@pytest.mark.parametrize(('left', 'noticed'), [('bfloat16', []), ('int8', ['MatMul_1'])])
def test_what_is_added_to_a_product_is_not_taken_for_a_factor(left, noticed):
    """A residual stream of a square matrix, which comes first among the inputs."""
    stream, bias = Operand('float32', (1, 8, 32)), Operand('float32', (1, 1, 32))
    factors = Operand(left, (1, 8, 32)), Operand('bfloat16', (1, 32, 32))
    inputs = (stream, factors[0], bias, factors[1])
    kernel = Kernel('fused', 'runtime_fusion', inputs, (stream,), ('MatMul_1', 'Add_2'))
    assert kernel.factors == (left, 'bfloat16')
    assert mixed_products([kernel]) == noticed


def test_what_is_added_to_a_product_is_not_taken_for_its_matrix():
    """As many tokens as the product has inputs."""
    stream, left = Operand('float32', (1, 48, 32)), Operand('bfloat16', (1, 48, 48))
    matrix, bias = Operand('bfloat16', (1, 48, 32)), Operand('float32', (1, 1, 32))
    inputs = (stream, left, bias, matrix)
    kernel = Kernel('fused', 'runtime_fusion', inputs, (stream,), ('MatMul_1', 'Add_2'))
    assert kernel.factors == ('bfloat16', 'bfloat16')


@pytest.fixture(scope='module')
def for_two_targets(tmp_path_factory) -> Path:
    """A bundle with engines for sm86 and sm89, built by the real library without a GPU."""
    bundle = write_exported_policy(tmp_path_factory.mktemp('rtx') / 'policy', precision='bfloat16')
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, RTX_MODULES[0], bindings())
        assert main(['build', str(bundle), '--target', 'sm86,sm89']) == 0
    return bundle


def test_a_build_for_targets_needs_no_gpu_and_says_what_is_missing(for_two_targets):
    (folder,) = (for_two_targets / 'engines').iterdir()
    assert folder.name == f'rtx-sm86-sm89-trtrtx{adapter().version}'
    data = json.loads((folder / METADATA).read_text())
    assert (data['targets'], data['gpu'], data['passed']) == (['sm86', 'sm89'], '', {})
    for entry in data['engines'].values():
        assert (folder / entry['file']).stat().st_size == entry['size'] > 100_000
        assert entry['scratch_bytes'] == 0


def device(capability: str) -> DeviceInfo:
    return DeviceInfo('NVIDIA GeForce RTX', capability, 128, 1 << 34, integrated=False)


@pytest.mark.parametrize(
    ('capability', 'version', 'passed', 'message'),
    [
        # Nothing was compared on this GPU.
        ('8.9', None, True, "field 'passed"),
        ('12.0', None, False, r'no engines were built for .*\(sm120\).*built for elsewhere: rtx-'),
        ('12.0', None, False, 'vla_runtime'),
        ('8.6', '1.8.0.1', False, r'TensorRT for RTX 1\.8\.0\.1; built for elsewhere: rtx-sm86'),
    ],
)
def test_engines_for_elsewhere_are_refused_with_what_to_do(
    for_two_targets, capability, version, passed, message
):
    files = read_bundle(for_two_targets, verify=False).spec.files
    with pytest.raises(ValueError, match=message):
        find_engines(
            for_two_targets,
            device(capability),
            version or adapter().version,
            files,
            rtx=True,
            passed=passed,
        )


def test_engines_for_a_target_are_found_by_each_of_its_gpus(for_two_targets):
    files = read_bundle(for_two_targets, verify=False).spec.files
    found = {
        find_engines(
            for_two_targets, device(capability), adapter().version, files, rtx=True, passed=False
        )[0]
        for capability in ('8.6', '8.9')
    }
    assert len(found) == 1


def test_an_unknown_target_is_refused_before_anything_is_read(tmp_path, capsys):
    assert main(['build', str(tmp_path), '--target', 'sm75']) == 2
    assert '(Turing)' in capsys.readouterr().err
