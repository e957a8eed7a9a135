"""Types of every exported graph keep the rules of precision; planted faults are found."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import onnx
import onnx_faults as faults
import pytest
import torch
from graph_origins import is_half_matrix
from graph_walk import bundle_faults, precision_faults
from network_cases import network_case_paths
from onnx import TensorProto
from onnx_bundles import copy_bundle, load_graph, onnx_of_case, save_graph, tiny_onnx_bundle
from onnx_faults import rounded

from vla_convert.export.onnx.export import meta_network
from vla_convert.export.onnx.precision import precision_of
from vla_convert.export.onnx.verification import VerificationError, check_graphs, verify_onnx
from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.onnx_files import ONNX_FOLDER, graph_names
from vla_runtime.models.blocks.layers import matrix_names

HALF = TensorProto.FLOAT16
FAMILIES = ['pi05', 'pi0', 'smolvla', 'act', 'evo1', 'groot_n15', 'groot_n16', 'groot_n17']
# Families of the default run. pi0, Evo-1 and GR00T N1.5 are made of blocks that the others have
# too. The export asks for half, not for which half: float16 runs the lines of bfloat16. Only a
# bfloat16 constant that is spread over rows has lines of its own (`row_axis.py`): ACT has one.
BY_DEFAULT = {
    'float32': FAMILIES,
    'float16': ['pi05', 'smolvla', 'act', 'groot_n17'],
    'bfloat16': ['pi05', 'act'],
}


def in_precisions(
    cases: Iterable[tuple[Any, ...]], ids: Iterable[str], thorough: Collection[str] = ()
) -> list[Any]:
    """Parameters of every case, which begins with its family, with each precision before it.

    Those of a precision that is `thorough` are for `./run test --all`.
    """
    return [
        pytest.param(
            precision,
            *case,
            id=f'{name}-{precision}',
            marks=[
                *([] if case[0] in BY_DEFAULT[precision] else [pytest.mark.slow]),
                *([pytest.mark.thorough] if precision in thorough else []),
            ],
        )
        for case, name in zip(cases, ids, strict=True)
        for precision in BY_DEFAULT
    ]


EVERY_EXPORT = in_precisions([(family,) for family in FAMILIES], FAMILIES)


def thorough_but(kept: Iterable[tuple[str, str]]) -> list[Any]:
    """Every export, and all but these (precision, family) for `./run test --all`."""
    return [
        case
        if case.values in kept
        else pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.thorough])
        for case in EVERY_EXPORT
    ]


@pytest.mark.parametrize(('precision', 'family'), thorough_but([('float32', 'act')]))
def test_every_exported_graph_keeps_the_rules(family, precision):
    bundle = tiny_onnx_bundle(family, precision)
    for name in graph_names():
        assert precision_faults(bundle / ONNX_FOLDER / name, precision) == []
        # Convolutions stay in float32, and ACT's images see nothing else.
        expected = 'float32' if (family, name) == ('act', 'vision.onnx') else precision
        assert precision_of(bundle / ONNX_FOLDER / name) == expected
    assert check_graphs(bundle) == (precision, precision)


@pytest.mark.thorough
@pytest.mark.cases
@pytest.mark.parametrize('path', network_case_paths(), ids=lambda path: path.stem)
def test_the_graphs_of_every_reference_case_keep_the_rules(path):
    bundle = onnx_of_case(path)[0]
    assert check_graphs(bundle) == ('float32', 'float32')
    assert bundle_faults(bundle) == []


@pytest.mark.thorough
@pytest.mark.parametrize('family', FAMILIES)
def test_the_matrices_that_may_be_in_half_are_those_that_the_networks_put_there(family):
    network = meta_network(read_bundle(tiny_onnx_bundle(family)).spec, torch.float16)
    matrices = {name for name in matrix_names(network) if not name.endswith('.bias')}
    assert {name for name, _ in network.named_parameters() if is_half_matrix(name)} == matrices


# ACT's norms come last in a layer: they amplify what bfloat16 rounds, in two of four random
# policies beyond the bound. Its own tests compare chunks.
@pytest.mark.parametrize(
    ('precision', 'family'),
    [
        case
        for case in thorough_but(
            [*(('float32', one) for one in ('pi05', 'smolvla', 'act')), ('float16', 'pi05')]
        )
        if case.values != ('bfloat16', 'act')
    ],
)
def test_exported_files_are_within_their_bounds(family, precision):
    bundle = tiny_onnx_bundle(family, precision)
    receipt = verify_onnx(bundle, read_bundle(bundle).spec)
    assert receipt.failures == []
    assert receipt.precision == precision


def test_half_files_hold_their_matrices_in_half_and_nothing_else():
    graph = load_graph(tiny_onnx_bundle('pi05', 'float16'), 'expert.onnx').graph
    kinds = {t.name: t.data_type for t in graph.initializer if '+' in t.name or 'blocks' in t.name}
    assert set(kinds.values()) == {HALF}
    assert {t.name for t in graph.initializer if t.data_type == HALF} == set(kinds)


IN_HALF = 'computes .* in b?float16'
ROUNDS = 'rounds'
WIDENS = 'widens'
PREFIX_FAULTS = [
    (rounded('image_tokens'), f"{ROUNDS} 'image_tokens'.*an input"),
    (rounded('text_embeddings'), f"{ROUNDS} 'text_embeddings'.*an input"),
    (faults.norm_in_half, f'ReduceMean.*{IN_HALF}'),
    # Of a file without half products, what is squared is the image tokens themselves.
    (faults.norm_mean_as_product, 'multiplies .* in b?float16; only products|an input'),
    (faults.norm_squares_as_product, 'multiplies .* in b?float16; only products|an input'),
    (faults.softmax_in_half, f'Softmax.*{IN_HALF}'),
    (faults.mask_in_half, f'Where.*{IN_HALF}'),
    (faults.position_in_half, 'index, mask or count must not be in half'),
    (faults.position_counted_in_float, 'of a mask: count in integers'),
    (faults.positions_rounded, f'{ROUNDS} .*positions'),
    (faults.positions_to_half, 'index, mask or count must not be in half'),
    (faults.rotary_angles_rounded, f'{ROUNDS} .*positions'),
    (faults.rotary_cosines_rounded, f'{ROUNDS} .*rotary angles'),
]
EXPERT_FAULTS = [
    *(
        (rounded(name), f"{ROUNDS} '{name}'.*an input")
        for name in ('t', 'dt', 'time_conditioning', 'plan', 'plan_weight', 'row_weight', 'x')
    ),
    (rounded('x_next'), f"{WIDENS} 'x_next/half'"),
    (rounded('velocity'), f"{WIDENS} 'velocity/half'"),
    (faults.update_in_half, f'Add.*{IN_HALF}'),
    (faults.update_quantised, 'QuantizeLinear.*is an operator that no policy'),
    (faults.norm_in_half, f'ReduceMean.*{IN_HALF}'),
    (faults.norm_mean_as_product, 'multiplies .* in b?float16; only products'),
    (faults.norm_squares_as_product, 'multiplies .* in b?float16; only products'),
    (faults.softmax_in_half, f'Softmax.*{IN_HALF}'),
    (faults.positions_rounded, f'{ROUNDS} .*positions'),
    (faults.positions_to_half, 'index, mask or count must not be in half'),
    (faults.rotary_angles_rounded, f'{ROUNDS} .*positions'),
]
VISION_FAULTS = [
    (rounded('pixels'), f"{ROUNDS} 'pixels'.*an input"),
    (rounded('image_tokens'), f"{WIDENS} 'image_tokens/half'"),
    (faults.pixels_in_eight_bits, 'float8e4m3fn'),
    (faults.layer_norm_in_half, f'LayerNormalization.*{IN_HALF}'),
    (faults.layer_norm_in_half_inside, 'norms .* in b?float16 .its stash_type. inside'),
]
MONOLITHIC_FAULTS = [
    *(
        (rounded(name), f"{ROUNDS} '{name}'.*an input")
        for name in ('pixels', 't', 'dt', 'time_conditioning', 'plan', 'row_weight')
    ),
    (rounded('x_next'), f"{WIDENS} 'x_next/half'"),
    (faults.a_step_rounded, f"{WIDENS} 'step_0/"),
    (faults.norm_in_half, f'ReduceMean.*{IN_HALF}'),
    (faults.norm_mean_as_product, 'multiplies .* in b?float16; only products'),
    (faults.softmax_in_half, f'Softmax.*{IN_HALF}'),
    (faults.positions_rounded, f'{ROUNDS} .*positions'),
    (faults.rotary_angles_rounded, f'{ROUNDS} .*positions'),
    (faults.token_index_in_float, 'index must be computed in integers'),
    (faults.token_index_in_half, 'index, mask or count must not be in half'),
]
GROOT_FAULTS = [
    ('prefix.onnx', faults.query_norm_in_half, f'ReduceMean.*{IN_HALF}'),
    ('prefix.onnx', faults.softmax_in_half, f'Softmax.*{IN_HALF}'),
    ('prefix.onnx', faults.positions_to_half, 'index, mask or count must not be in half'),
    ('prefix.onnx', faults.rotary_angles_rounded, f'{ROUNDS} .*positions'),
    ('expert.onnx', faults.layer_norm_in_half, f'LayerNormalization.*{IN_HALF}'),
    ('expert.onnx', rounded('state'), f"{ROUNDS} 'state'.*an input"),
    ('expert_r2.onnx', rounded('time_conditioning'), f"{ROUNDS} 'time_conditioning'.*an input"),
]
FAULTS = [
    ('pi05', name, *pair)
    for name, pairs in (
        ('vision.onnx', VISION_FAULTS),
        ('prefix.onnx', PREFIX_FAULTS),
        ('expert_r2.onnx', EXPERT_FAULTS),
        ('monolithic.onnx', MONOLITHIC_FAULTS),
    )
    for pair in pairs
] + [
    ('pi0', 'expert.onnx', rounded('state'), f"{ROUNDS} 'state'.*an input"),
    ('pi0', 'expert.onnx', rounded('time_conditioning'), f"{ROUNDS} 'time_conditioning'.*an input"),
    ('pi0', 'expert_r2.onnx', faults.norm_mean_as_product, 'multiplies .* in b?float16; only'),
    ('pi0', 'monolithic_r2.onnx', rounded('state'), f"{ROUNDS} 'state'.*an input"),
    ('evo1', 'prefix.onnx', faults.query_bias_in_half, f'Add.*{IN_HALF}'),
    ('evo1', 'prefix.onnx', rounded('state'), f"{ROUNDS} 'state'.*an input"),
    *(
        (family, *fault)
        for family in ('groot_n15', 'groot_n16', 'groot_n17')
        for fault in GROOT_FAULTS
    ),
]


@pytest.fixture(scope='module')
def grounds(tmp_path_factory) -> Path:
    """Folder for graphs beside copies of their weights."""
    return tmp_path_factory.mktemp('grounds')


def plant(fault, family: str, precision: str, name: str, grounds: Path) -> Path:
    """A graph file with a fault, which is still a valid one."""
    bundle = grounds / f'{family}_{precision}'
    if not bundle.exists():
        copy_bundle(tiny_onnx_bundle(family, precision), bundle)
    model = load_graph(bundle, name)
    fault(model)
    save_graph(model, bundle, 'planted.onnx')
    path = bundle / ONNX_FOLDER / 'planted.onnx'
    onnx.checker.check_model(str(path), full_check=True)
    return path


@pytest.mark.parametrize(
    ('precision', 'family', 'name', 'fault', 'message'),
    in_precisions(
        FAULTS,
        [f'{family}-{name}-{fault.__name__}' for family, name, fault, _ in FAULTS],
        # What is in half is found by the same lines, whichever half it is.
        thorough=['bfloat16'],
    ),
)
def test_a_planted_fault_is_found_and_named(grounds, precision, family, name, fault, message):
    path = plant(fault, family, precision, name, grounds)
    found = precision_faults(path, precision)
    assert any(re.search(message, line) for line in found), found


@pytest.mark.parametrize('precision', ['float16', 'bfloat16'])
@pytest.mark.parametrize(
    ('name', 'fault', 'message'),
    [
        ('prefix.onnx', faults.past_made_the_wrong_way_round, "output 'past_key' is values, in"),
        ('expert.onnx', faults.past_read_the_wrong_way_round, 'by .*past keys'),
        ('expert_r2.onnx', faults.time_comes_in_half, "'t' is in b?float16 and must be float"),
    ],
)
def test_only_the_past_goes_in_and_out_in_half(grounds, precision, name, fault, message):
    path = plant(fault, 'pi05', precision, name, grounds)
    found = precision_faults(path, precision)
    assert any(re.search(message, line) for line in found), found


def test_the_file_is_named_too_and_one_fault_is_told_once(tmp_path):
    bundle = copy_bundle(tiny_onnx_bundle('pi05', 'float16'), tmp_path / 'planted')
    model = load_graph(bundle, 'prefix_r2.onnx')
    faults.rotary_angles_rounded(model)
    save_graph(model, bundle, 'prefix_r2.onnx')
    (line,) = bundle_faults(bundle)
    assert re.search(r"prefix_r2\.onnx: node '\S+' \(Cast\) rounds 'Concat_\d+' \(float\)", line)


def test_an_operator_that_the_file_redefines_is_a_fault(grounds):
    bundle = copy_bundle(tiny_onnx_bundle(), grounds / 'redefined')
    model = load_graph(bundle, 'vision.onnx')
    faults.layer_norm_redefined(model)
    save_graph(model, bundle, 'vision.onnx')
    with pytest.raises(VerificationError, match="'LayerNormalization'"):
        check_graphs(bundle)


def test_types_that_contradict_each_other_are_an_error(grounds):
    bundle = copy_bundle(tiny_onnx_bundle(), grounds / 'contradicting')
    model = load_graph(bundle, 'vision.onnx')
    name = model.graph.node[0].output[0]
    model.graph.value_info.append(onnx.helper.make_tensor_value_info(name, HALF, None))
    save_graph(model, bundle, 'vision.onnx')
    with pytest.raises(ValueError, match=r'vision\.onnx'):
        check_graphs(bundle)


def test_a_float32_file_in_a_float16_bundle_is_no_fault_but_the_other_way_round_is():
    folder = tiny_onnx_bundle('pi05', 'float16') / ONNX_FOLDER
    assert any(
        'meant to be' in fault for fault in precision_faults(folder / 'expert.onnx', 'float32')
    )


def test_a_node_with_an_inside_of_its_own_is_a_fault(tmp_path):
    bundle = copy_bundle(tiny_onnx_bundle(), tmp_path / 'planted')
    model = load_graph(bundle, 'vision.onnx')
    model.graph.node[-1].domain = 'com.microsoft'
    model.opset_import.add(domain='com.microsoft', version=1)
    save_graph(model, bundle, 'vision.onnx')
    with pytest.raises(VerificationError):
        check_graphs(bundle)


def test_a_file_that_is_no_graph_is_an_error(tmp_path):
    (tmp_path / 'broken.onnx').write_bytes(b'nothing of the kind')
    with pytest.raises(ValueError, match=r'broken\.onnx'):
        precision_of(tmp_path / 'broken.onnx')
