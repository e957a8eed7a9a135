"""The TensorRT adapter: the names that it uses exist in each release, and what differs is right."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import rtx_plans
from fake_cuda import FakeCuda
from fake_tensorrt import NAMES, RELEASES, RTX, FakeLayer, FakeTensorRT

from vla_runtime.engines.tensorrt.adapter import (
    BuildOptions,
    TensorRT,
    TensorRTError,
    import_tensorrt,
)

OLDEST, NEWEST = RELEASES[0], RELEASES[-1]
# Bindings, and the package that brings each; any that can be imported here is checked.
# test/real_bindings/check.py fetches releases and runs this file for each.
REAL_MODULES = {
    'tensorrt': 'tensorrt',
    'tensorrt_lean': 'tensorrt-lean',
    'tensorrt_bindings': 'tensorrt-cu13-bindings',
    'tensorrt_lean_bindings': 'tensorrt-lean-cu13-bindings',
    'tensorrt_rtx_bindings': 'tensorrt-rtx-cu13-bindings',
}


@pytest.fixture(scope='module')
def graph(tmp_path_factory) -> Path:
    """An ONNX file of one operator, with an axis of any length."""
    from onnx import TensorProto, helper, save

    inputs, outputs = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ['rows', 4])] for name in 'xy'
    )
    node = helper.make_node('Neg', ['x'], ['y'])
    model = helper.make_model(
        helper.make_graph([node], 'graph', inputs, outputs),
        opset_imports=[helper.make_opsetid('', 17)],
        ir_version=8,
    )
    path = tmp_path_factory.mktemp('onnx') / 'graph.onnx'
    save(model, path)
    return path


def run_everything(release: str, graph: Path, folder: Path) -> FakeTensorRT:
    """Build, load and run on a fake release; it holds the names that were used."""
    trt = FakeTensorRT(release)
    matrix = FakeLayer(trt, 'CONSTANT', 'HALF')
    product = FakeLayer(trt, 'MATRIX_MULTIPLY', 'HALF', inputs=[matrix.get_output(0)] * 2)
    trt.layers = [matrix, product]
    adapter = TensorRT(trt)
    options = BuildOptions(
        1 << 20,
        reduced=True,
        lengths=(1, 2),
        targets=('sm89', 'sm120') if release == RTX else (),
        progress=lambda phase, done, total: True,
    )
    plan = folder / f'{release}.engine'
    plan.write_bytes(adapter.build(graph, options).plan)
    addresses = [trt.cuda.cuMemAlloc(2048)[1] for _ in range(3)]
    for rows, network in enumerate(adapter.load(plan, 77, lengths=(1, 2)), 1):
        assert {info.shape for info in network.tensors.values()} == {(rows, 4)}
        network.use_scratch(addresses[0], 2048)
        network.bind({'x': addresses[1], 'y': addresses[2]})
        network.enqueue(77)
        network.close()
    return trt


@pytest.mark.parametrize('release', [*RELEASES, RTX])
def test_building_and_running_uses_only_names_that_the_release_has(release, graph, tmp_path):
    # The fake raises AttributeError for any other name, as the real module does.
    used = run_everything(release, graph, tmp_path).used
    assert ('Builder', 'build_serialized_network') in used
    assert ('IExecutionContext', 'execute_async_v3') in used


def test_a_name_that_a_release_lacks_is_noticed(graph, tmp_path):
    adapter = TensorRT(FakeTensorRT(NEWEST))
    # What 11 dropped.
    adapter.major = 8
    with pytest.raises(AttributeError, match='EXPLICIT_BATCH'):
        adapter.build(graph, BuildOptions(lengths=(1,)))


@pytest.mark.parametrize('name', REAL_MODULES)
def test_the_names_used_are_in_the_real_bindings(name, graph, tmp_path):
    try:
        rtx = name == 'tensorrt_rtx_bindings'
        real = rtx_plans.bindings() if rtx else importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f'no real {name} here ({error}); pip install {REAL_MODULES[name]}')
    release = RTX
    if not TensorRT(real).is_rtx:
        release = max(
            (each for each in RELEASES if numbers(each) <= numbers(real.__version__)),
            key=numbers,
            default=OLDEST,
        )
    used = run_everything(release, graph, tmp_path).used
    lean = not hasattr(real, 'Builder')
    kinds = {kind for kind, _ in used if hasattr(real, kind)}
    assert {'Runtime', 'ICudaEngine', 'IExecutionContext', 'TensorIOMode'} <= kinds
    assert lean or {kind for kind, _ in used} == kinds
    missing = [pair for pair in sorted(used) if pair[0] in kinds and not _has(real, *pair)]
    assert not missing
    # Its classes can be subclassed the way the adapter does; a logger needs no GPU.
    assert TensorRT(real).version == real.__version__


def _has(module: object, kind: str, name: str) -> bool:
    return hasattr(getattr(module, kind), name)


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split('.')[:2])


def test_the_name_lists_tell_the_releases_apart():
    assert 'EXPLICIT_BATCH' not in NAMES[NEWEST]['NetworkDefinitionCreationFlag']
    assert 'STRONGLY_TYPED' not in NAMES[OLDEST]['NetworkDefinitionCreationFlag']
    assert 'IProgressMonitor' not in NAMES[OLDEST]
    assert 'FP16' not in NAMES[NEWEST]['BuilderFlag']
    assert 'device_memory_size' not in NAMES[NEWEST]['ICudaEngine']


@pytest.mark.parametrize('release', RELEASES)
def test_float32_products_are_never_rounded_to_tf32(release, graph):
    trt = FakeTensorRT(release)
    TensorRT(trt).build(graph, BuildOptions(workspace_bytes=5 << 20, lengths=(1,)))
    (config,) = trt.configs
    assert 'TF32' not in config._flags
    assert config._limits == {'WORKSPACE': 5 << 20}


@pytest.mark.parametrize('release', RELEASES[1:])
def test_products_of_float16_are_added_up_in_float32_and_rounded_after(graph, release):
    trt = FakeTensorRT(release)
    source, other = (FakeLayer(trt, 'CONSTANT', 'HALF') for _ in range(2))
    first = FakeLayer(
        trt, 'MATRIX_MULTIPLY', 'HALF', inputs=[source.get_output(0), other.get_output(0)]
    )
    second = FakeLayer(
        trt, 'MATRIX_MULTIPLY', 'HALF', inputs=[first.get_output(0), other.get_output(0)]
    )
    norm = FakeLayer(trt, 'CAST', 'FLOAT', inputs=[second.get_output(0)])
    wide = FakeLayer(
        trt, 'MATRIX_MULTIPLY', 'FLOAT', inputs=[norm.get_output(0), norm.get_output(0)]
    )
    trt.layers = [source, other, first, second, norm, wide]
    TensorRT(trt).build(graph, BuildOptions(reduced=True, lengths=(1,)))
    made_by = {layer.get_output(0).name: layer for layer in trt.layers}

    def origin(tensor) -> tuple[str, str, FakeLayer]:
        layer = made_by[tensor.name]
        return layer.type.name, tensor.dtype.name, layer

    for product, operands in ((first, (source, other)), (second, (first, other))):
        for number, operand in enumerate(operands):
            kind, dtype, cast = origin(product.get_input(number))
            assert (kind, dtype) == ('CAST', 'FLOAT')
            read = origin(cast.get_input(0))
            if operand is first:
                # Rounded in between, as the file says.
                assert read[:2] == ('CAST', 'HALF')
                read = origin(read[2].get_input(0))
            assert read[2] is operand
    assert origin(norm.get_input(0))[:2] == ('CAST', 'HALF')
    assert wide.get_input(0) is norm.get_output(0)


def test_on_8_6_every_layer_is_pinned_to_the_type_of_the_file(graph):
    trt = FakeTensorRT(OLDEST)
    product = FakeLayer(trt, 'MATRIX_MULTIPLY', 'HALF')
    softmax = FakeLayer(trt, 'SOFTMAX', 'FLOAT')
    split = FakeLayer(trt, 'TOPK', 'FLOAT', 'INT32')
    cast = FakeLayer(trt, 'CAST', 'FLOAT')
    trt.layers = [product, softmax, split, cast]
    built = TensorRT(trt).build(graph, BuildOptions(reduced=True, lengths=(1,)))
    assert trt.configs[0]._flags == {'FP16', 'OBEY_PRECISION_CONSTRAINTS'}
    assert (product._precision.name, softmax._precision.name) == ('HALF', 'FLOAT')
    assert split._precision is None and cast._precision is None
    assert product._set[0].name == 'HALF' and softmax._set[0].name == 'FLOAT'
    assert built.pinned == {'float32': 1, 'float16': 1}


def test_on_8_6_neither_cublas_nor_cudnn_is_asked_for(graph):
    trt = FakeTensorRT(OLDEST)
    TensorRT(trt).build(graph, BuildOptions(lengths=(1,)))
    assert trt.configs[0]._sources == 0b11000


@pytest.mark.parametrize('release', RELEASES[1:])
def test_later_releases_take_the_types_from_the_file(release, graph):
    trt = FakeTensorRT(release)
    trt.layers = [FakeLayer(trt, 'SOFTMAX', 'FLOAT')]
    assert TensorRT(trt).build(graph, BuildOptions(reduced=True, lengths=(1,))).pinned == {}
    assert trt.configs[0]._flags == set()


def test_the_timing_cache_is_used_and_handed_on(graph):
    options = BuildOptions(timing_cache=b'seen', lengths=(1,))
    built = TensorRT(FakeTensorRT(NEWEST)).build(graph, options)
    assert built.timing_cache == b'seen+'


def test_builds_have_one_builder_until_it_is_freed(graph):
    trt = FakeTensorRT(NEWEST)
    adapter = TensorRT(trt)
    for _ in range(2):
        adapter.build(graph, BuildOptions(lengths=(1,)))
    assert len(trt.builders) == 1
    adapter.free_builder()
    assert trt.builders[0]() is None
    adapter.build(graph, BuildOptions(lengths=(1,)))
    assert len(trt.builders) == 2


def test_a_timing_cache_of_another_gpu_is_begun_anew(graph, caplog):
    options = BuildOptions(timing_cache=b'elsewhere', lengths=(1,))
    built = TensorRT(FakeTensorRT(NEWEST)).build(graph, options)
    assert built.timing_cache == b'+'
    assert 'timing cache' in caplog.text


def test_progress_is_told_where_the_release_can_tell(graph):
    for release in RELEASES:
        told = []
        options = BuildOptions(
            lengths=(1,), progress=lambda *step, to=told: to.append(step) or True
        )
        adapter = TensorRT(FakeTensorRT(release))
        adapter.build(graph, options)
        assert bool(told) == adapter.reports_progress == (release != OLDEST)
    assert told[0] == ('Building', 0, 3) and told[-1] == ('Building', 3, 3)


def test_ctrl_c_during_a_build_stops_it_at_the_next_step(graph):
    trt = FakeTensorRT(NEWEST)

    def interrupted(phase, done, total):
        if done == 2:
            raise KeyboardInterrupt
        return True

    with pytest.raises(KeyboardInterrupt):
        TensorRT(trt).build(graph, BuildOptions(lengths=(1,), progress=interrupted))
    assert trt.steps_told == 1


def test_a_progress_display_that_fails_does_not_stop_the_build(graph):
    def broken(phase, done, total):
        raise ValueError('no terminal')

    options = BuildOptions(lengths=(1,), progress=broken)
    assert TensorRT(FakeTensorRT(NEWEST)).build(graph, options).plan


def test_what_cannot_be_parsed_is_named(graph):
    trt = FakeTensorRT(NEWEST)
    trt.fail_parse = 'no importer for Fancy'
    with pytest.raises(TensorRTError, match=r'graph\.onnx'):
        TensorRT(trt).build(graph, BuildOptions(lengths=(1,)))


def test_a_failed_build_tells_what_tensorrt_logged(graph):
    trt = FakeTensorRT(NEWEST)
    trt.fail_build = 'no implementation for node Softmax_3'
    with pytest.raises(TensorRTError):
        TensorRT(trt).build(graph, BuildOptions(lengths=(1,)))


def test_a_plan_of_another_release_is_refused_with_what_tensorrt_logged(tmp_path):
    path = tmp_path / 'expert.engine'
    path.write_text(json.dumps({'release': OLDEST, 'onnx': 'graph.onnx'}))
    with pytest.raises(TensorRTError, match=r'expert\.engine'):
        TensorRT(FakeTensorRT(NEWEST)).load(path, 77)
    path.write_bytes(b'')
    with pytest.raises(TensorRTError, match='empty'):
        TensorRT(FakeTensorRT(NEWEST)).load(path, 77)


def test_a_builder_that_cannot_be_made_is_an_error_of_ours(graph):
    trt = FakeTensorRT(NEWEST, FakeCuda(devices=None))
    with pytest.raises(TensorRTError, match='no builder'):
        TensorRT(trt).build(graph, BuildOptions(lengths=(1,)))


@pytest.mark.parametrize('version', ['8.5.3', '9.3.0', '10.0.1', '7.1', 'odd'])
def test_releases_that_were_never_looked_at_are_refused(version):
    with pytest.raises(ValueError, match='supported'):
        TensorRT(SimpleNamespace(__version__=version))


def test_bfloat16_is_not_offered_by_8_6():
    assert TensorRT(FakeTensorRT(OLDEST)).precisions == ('float32', 'float16')
    assert 'bfloat16' in TensorRT(FakeTensorRT(NEWEST)).precisions


def test_a_tensorrt_without_its_libraries_is_told(monkeypatch, tmp_path):
    (tmp_path / 'tensorrt').mkdir()
    (tmp_path / 'tensorrt' / '__init__.py').write_text(
        "raise ImportError('libnvinfer.so.10: cannot open shared object file')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r'libnvinfer\.so\.10'):
        import_tensorrt()


def test_all_adapters_of_one_module_share_its_logger(tmp_path):
    given = []
    other = FakeTensorRT(NEWEST)
    trt = FakeTensorRT(NEWEST)
    for module in (trt, other):
        make = module.Runtime
        module.Runtime = lambda logger, make=make: given.append(logger) or make(logger)
    (tmp_path / 'no.engine').write_bytes(b'no engine')
    for module in (trt, trt, other):
        with pytest.raises(TensorRTError):
            TensorRT(module).load(tmp_path / 'no.engine', 0)
    first, second, of_another = given
    assert first is second and first is not of_another
