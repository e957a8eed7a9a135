"""Sessions of a bundle's graphs, checked against policy.yaml and against each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from vla_runtime.bundle.onnx_files import (
    IMAGE_INPUTS,
    ONNX_FOLDER,
    PASS_INPUTS,
    PASS_OUTPUTS,
    QUANTISED,
    STEP_OUTPUTS,
    TEXT_INPUT,
    TOKENS,
    Network,
    Precision,
    graph_path,
    step_inputs,
    vision_names,
)
from vla_runtime.engines.devices import check_int8
from vla_runtime.engines.onnx.four_bit_emulation import emulated
from vla_runtime.engines.onnx.session import (
    KIND_OF,
    SKIPPED_REWRITES,
    Placement,
    Session,
    session_options,
)
from vla_runtime.engines.onnx.shapes import GraphShapes, Tensors, image_input
from vla_runtime.family.declaration import Family, PolicyDims, distinct_image_sizes
from vla_runtime.files.quotes import one_line


@dataclass(frozen=True)
class Graphs:
    """The sessions of one engine: vision by image size, prefix and expert by prompt rows."""

    vision: Mapping[tuple[int, int], Session]
    prefix: Mapping[int, Session]
    expert: Mapping[int, Session]


def load_graphs(
    folder: Path,
    place: Placement,
    family: Family,
    dims: PolicyDims,
    conditioning: int,
    precision: str,
    rows: Sequence[int],
    threads: int | None = None,
) -> Graphs:
    """Load and check the graphs of an engine.

    Args:
        precision: precision that the files must have been exported in.

    Raises:
        ValueError: a file that cannot be loaded, is the graph of another network, precision or
            policy, or does not fit the others.
    """

    def load(network: Network, path: Path) -> Session:
        skipped = list(SKIPPED_REWRITES.get(precision, ()))
        options = session_options(threads)
        session = Session(path, place, options, emulated(path), disabled_optimizers=skipped)
        _check_names(session, network, family, dims)
        return session

    # The smallest first, so that a conflict shows before the large ones are loaded.
    expert = {1: load('expert', graph_path(folder, 'expert'))}
    own = {TEXT_INPUT, *_own_inputs(family, dims)}
    handed_over = {name: port for name, port in expert[1].inputs.items() if name not in own}
    _check_precision(expert[1], tensors_of(handed_over), precision)
    sizes = distinct_image_sizes(dims)
    vision = {
        size: load('vision', folder / ONNX_FOLDER / name)
        for size, name in zip(sizes, vision_names(len(sizes)), strict=True)
    }
    tokens = [_image_tokens(session, size) for size, session in vision.items()]
    prefix: dict[int, Session] = {}
    network: Literal['prefix', 'expert']
    for count in rows:
        prefix[count] = load('prefix', graph_path(folder, 'prefix', count))
        if count not in expert:
            expert[count] = load('expert', graph_path(folder, 'expert', count))
        past = tensors_of(prefix[count].outputs)
        for network, session in (('prefix', prefix[count]), ('expert', expert[count])):
            text = tensors_of(session.inputs).get(TEXT_INPUT)
            width = None if text is None else text[1][-1]
            shapes = GraphShapes(family, dims, count, max(tokens), past, conditioning, width)
            _check_shapes(session, shapes.inputs(network), shapes.outputs(network), shapes)
    return Graphs(vision, prefix, expert)


def _image_tokens(session: Session, size: tuple[int, int]) -> tuple[int, ...]:
    """Check the vision graph of an image size; return (N, W) of its image tokens."""
    tokens = tuple(session.outputs['image_tokens'].shape[1:])
    _check_shapes(session, image_input(1, size), {'image_tokens': ('float32', (1, *tokens))})
    return tokens


def tensors_of(ports: Mapping[str, Any]) -> Tensors:
    return {
        name: (KIND_OF.get(port.type, port.type), tuple(port.shape)) for name, port in ports.items()
    }


def _check_names(session: Session, network: Network, family: Family, dims: PolicyDims) -> None:
    inputs = {
        'vision': {'pixels'},
        'prefix': {*IMAGE_INPUTS, *_hosted(session, set(family.prefix_inputs(dims)))},
        'expert': _hosted(session, _own_inputs(family, dims)),
    }[network]
    given = PASS_OUTPUTS if family.head == 'tokens' else STEP_OUTPUTS
    outputs = {'vision': {'image_tokens'}, 'prefix': set(), 'expert': set(given)}[network]
    parts = (('input', session.inputs, inputs), ('output', session.outputs, outputs))
    for what, found, expected in parts:
        if not expected <= set(found):
            raise _other_graph(session, network, what, found, expected)


def _own_inputs(family: Family, dims: PolicyDims) -> set[str]:
    steps = ('x', *step_inputs(has_scheduler=family.has_scheduler))
    own = PASS_INPUTS if family.head == 'tokens' else steps
    return {*own, *family.head_inputs(dims)}


def _hosted(session: Session, names: set[str]) -> set[str]:
    """Put rows of the text table in place of the tokens, where the graph takes those."""
    return names - {TOKENS} | {TEXT_INPUT} if TEXT_INPUT in session.inputs else names


def _check_shapes(
    session: Session, inputs: Tensors, outputs: Tensors, shapes: GraphShapes | None = None
) -> None:
    past = () if shapes is None else shapes.past
    network = session.path.stem
    parts = (
        ('input', tensors_of(session.inputs), inputs),
        ('output', tensors_of(session.outputs), outputs),
    )
    for what, found, expected in parts:
        if set(found) != set(expected):
            raise _other_graph(session, network, what, found, expected)
        for name, (kind, shape) in expected.items():
            if found[name] == (kind, shape):
                continue
            found_kind, found_shape = found[name]
            source = 'its prefix' if name in past else 'the dimensions in policy.yaml'
            raise ValueError(
                f"{session.path}: {what} '{name}' is {found_kind} {list(found_shape)}, but "
                f'{source} make it {kind} {list(shape)}; export the bundle again'
            )


def _check_precision(expert: Session, past: Tensors, asked: str) -> None:
    """Refuse files of another precision: by their own word, else that of keys and values."""
    for kind in [expert.precision] if expert.precision else [kind for kind, _ in past.values()]:
        if kind in get_args(Precision) and kind != asked:
            raise ValueError(
                f"precision '{asked}' was asked for, but the files in {expert.path.parent} were "
                f'exported in {kind}; set precision to {kind}, or export with --onnx-precision '
                f'{asked}'
            )
    if expert.precision in QUANTISED:
        if expert.placement.memory != 'cpu':
            raise ValueError(
                f"device '{expert.placement.device}': the files in {expert.path.parent} are in "
                f'{expert.precision}, which ONNX Runtime runs on the CPU alone here; use device '
                'cpu, or backend tensorrt, or export with --onnx-precision float16'
            )
        if expert.precision == 'int8':
            check_int8()


def _other_graph(
    session: Session, network: str, what: str, found: Iterable[str], expected: Iterable[str]
) -> ValueError:
    return ValueError(
        f'{session.path}: is not the graph of {network}: its {what}s are {_listed(found)} where '
        f'{_listed(expected)} are expected; export the bundle again'
    )


def _listed(names: Iterable[str]) -> str:
    return one_line(', '.join(names), 200)
