"""Check a policy bundle and print its contents, or those of the one that a server has.

Every file is compared with its SHA-256 in policy.yaml, the weights and the tokenizer with the
networks that policy.yaml describes, and the weights are searched for numbers that are none.

--quick reads names, shapes and the tokenizer only: a quick look at a large bundle. --no-verify
leaves out the SHA-256 alone.

Of a server its contract is printed: what the policy reads and returns, and what it runs on.

examples:
  vla_runtime info engines/demo
  vla_runtime info ws://box:8000
  vla_runtime info wss://box:8000/policies/mine --key-file key.txt --ca-file cert.pem
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from vla_runtime.cli._packages import import_problem
from vla_runtime.cli._server import add_server_arguments, contract_at, is_server

if TYPE_CHECKING:
    from vla_runtime.bundle.folder import Bundle


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'bundle', metavar='BUNDLE', help='the folder to read, its policy.yaml, or ws://HOST:PORT'
    )
    parser.add_argument('--no-verify', action='store_true', help='do not hash the files')
    parser.add_argument(
        '--quick', action='store_true', help='neither hash the files nor read the weights'
    )
    add_server_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    try:
        from vla_runtime.bundle.folder import BundleError, read_bundle
        from vla_runtime.bundle.summary import describe, line
        from vla_runtime.bundle.writer import bundle_notes
        from vla_runtime.engines.tensorrt.store import state_of
        from vla_runtime.files.quotes import join_truncated
        from vla_runtime.messages.trajectories import spoken
    except ModuleNotFoundError as error:
        how = "./run setup, or pip install '.[torch]' in the source folder"
        print(f'error: {import_problem(error, "info", how)}', file=sys.stderr)
        return 2

    if is_server(arguments.bundle):
        return _of_server(arguments)
    verify = not (arguments.no_verify or arguments.quick)
    try:
        bundle = read_bundle(arguments.bundle, verify=verify)
        weights, huge = _check(bundle, arguments.quick)
    except (BundleError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    print(describe(bundle.spec))
    print(line('weights', weights))
    checked = 'SHA-256 of each agrees' if verify else 'names only'
    print(line('files', f'{len(bundle.spec.files)}, {checked}'))
    print(line('backends', _backends(bundle)))
    print(line('messages', spoken()))
    if exported := _onnx(bundle):
        print(line('onnx', exported))
    for engine in sorted(bundle.engines_folder.glob('*')):
        print(line('engine', f'{engine.name}: {state_of(engine, bundle.spec.files)}'))
    if huge:
        shown = join_truncated(huge, ', ')
        print(line('note', f'weights above 10,000, as of a training that failed: {shown}'))
    for note in bundle_notes(bundle.spec, bundle.statistics):
        print(line('note', note))
    return 0


def _of_server(arguments: argparse.Namespace) -> int:
    from vla_runtime.bundle.summary import describe, line
    from vla_runtime.bundle.writer import bundle_notes

    try:
        contract = contract_at(arguments.bundle, arguments)
    except (OSError, ValueError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    print(describe(contract.spec))
    print(line('bundle', f'SHA-256 {contract.bundle_sha256}'))
    runs = f'{contract.backend} on {contract.device} in {contract.precision}'
    print(line('server', f'{arguments.bundle}, vla_runtime {contract.version}, {runs}'))
    print(line('machine', contract.machine.get('cpu', 'unknown')))
    for note in bundle_notes(contract.spec, contract.statistics):
        print(line('note', note))
    return 0


def _onnx(bundle: Bundle) -> str:
    """Return precision and form of attention of the ONNX files; empty without any."""
    from vla_runtime.bundle.onnx_files import (
        GRAPHS_FILE,
        ONNX_FOLDER,
        ROWS_GRAPHS,
        read_graph_facts,
    )
    from vla_runtime.files.json_file import JsonError

    folder = bundle.folder / ONNX_FOLDER
    if not (folder / GRAPHS_FILE).is_file():
        return ''
    try:
        exported = read_graph_facts(folder, ('vision.onnx', *ROWS_GRAPHS))
    except JsonError as error:
        return f'damaged: {error}'
    beside = '' if exported.beside == exported.precision else f' beside {exported.beside}'
    fused = any('Attention' in graph.operators for graph in exported.graphs.values())
    form = 'fused' if fused else 'exact'
    return f'{exported.precision}{beside}, attention {form}'


def _backends(bundle: Bundle) -> str:
    from vla_runtime.engines.candidates import candidates, reduced_precisions
    from vla_runtime.engines.preflight import AUTO

    try:
        found = candidates(bundle, AUTO, 'cpu', AUTO)
    except ValueError:
        return 'none runs it on a CPU'
    refused = ''.join(
        f', and not {one}: {_runnable(bundle, why)}'
        for one, why in reduced_precisions(bundle, 'cpu').items()
        if why
    )
    return f'on cpu: {", ".join(map(str, found))}; auto takes the first that can run{refused}'


def _runnable(bundle: Bundle, fault: str) -> str:
    """Return a reason without a study's command: studies judge on the simulated tabletop."""
    from vla_runtime.files.package_files import share_folder
    from vla_runtime.robot.file import load_robot
    from vla_runtime.robot.match import MatchError, match_robot

    reason, study, _ = fault.partition(': vla_runtime study')
    if not study:
        return fault
    try:
        robot = load_robot(share_folder() / 'config' / 'robots' / 'tabletop.yaml')
        match_robot(robot, bundle.spec, bundle.folder)
    except MatchError:
        return f'{reason} (studies judge on the simulated tabletop robot, which it does not drive)'
    return fault


def _check(bundle: Bundle, quick: bool) -> tuple[str, list[str]]:
    """Check the files' contents; return the weights in words, and tensors with huge numbers."""
    from vla_runtime.files.atomic_write import progress
    from vla_runtime.models.shapes.bundle_contents import check_contents, check_finite, weight_bytes

    compared = check_contents(bundle)
    fit = 'fit the networks' if compared else 'not compared with the networks (needs PyTorch)'
    size = weight_bytes(bundle)
    if quick:
        return f'{size / 1e6:,.1f} MB, {fit}, numbers not read', []
    with progress('read weights', size) as advance:
        huge = check_finite(bundle, advance)
    return f'{size / 1e6:,.1f} MB, {fit}, every number is finite', huge
