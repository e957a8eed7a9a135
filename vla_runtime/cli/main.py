"""`vla_runtime VERB`: one module a verb, found in the `cli` folders of the packages that are here.

A verb's module has a docstring (its first line is the help), `add_arguments(parser)` and
`main(arguments) -> int`; its name is the verb, dashes for underscores. It imports what is slow or
optional (torch, rclpy) inside `main`, so that help is quick and works without them.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import pkgutil
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from types import ModuleType

from vla_runtime import __version__
from vla_runtime.cli._packages import import_problem
from vla_runtime.files.atomic_write import STANDARD_OUTPUT
from vla_runtime.files.standard_output import LostOutputError, watched_output

# The packages that have verbs. A robot needs the first one alone.
_PACKAGES = ('vla_runtime', 'vla_tools', 'vla_tabletop')
_INSTALL = "./run setup, or pip install '.[torch,onnx,report,serve]' in the source folder"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb.

    Args:
        argv: without the program's name; None: the process's own.

    Returns:
        The exit code: 0, 2 for wrong arguments, an unusable file or a missing package, 130 for
        Ctrl-C, 143 for SIGTERM and 129 for SIGHUP where the verb does not say otherwise, 141 where
        nobody reads the output any more (`| head`).
    """
    _complete()
    argv = list(sys.argv[1:] if argv is None else argv)
    with _tidy_end():
        return _run(argv)


class _Ended(KeyboardInterrupt):
    """A signal that ends the process, taken like Ctrl-C: what was begun is cleared away."""

    def __init__(self, number: int) -> None:
        super().__init__(f'ended by {signal.Signals(number).name}')
        self.exit_code = 128 + number


@contextmanager
def _tidy_end() -> Iterator[None]:
    """Raise `_Ended` at the first SIGTERM or SIGHUP that would end the process at once."""
    mine = threading.current_thread() is threading.main_thread()
    taken = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if mine and signal.getsignal(number) is signal.SIG_DFL
    ]

    def end(number: int, _: object) -> None:
        for one in taken:
            signal.signal(one, signal.SIG_IGN)
        raise _Ended(number)

    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            # Once the end has begun, here or in a verb, no more of them is wanted.
            if signal.getsignal(number) is end:
                signal.signal(number, signal.SIG_DFL)


def _run(argv: list[str]) -> int:
    try:
        with watched_output():
            return _run_verb(argv)
    except LostOutputError as lost:
        return lost.report()
    except ImportError as error:
        package = (error.name or '').split('.')[0]
        if package.startswith('vla_') and _is_here(package):
            # A fault of ours, such as a module that was moved.
            raise
        print(f'error: {import_problem(error, argv[0], _INSTALL)}', file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(str(stop) or 'interrupted', file=sys.stderr)
        return getattr(stop, 'exit_code', 130)


def _run_verb(argv: list[str]) -> int:
    try:
        arguments = _parsed(argv)
    except SystemExit as stop:
        # argparse leaves this way after help (0) and after a wrong argument (2).
        return int(stop.code or 0)
    # A file on standard output is for a program: what a person reads goes beside it.
    has_file = STANDARD_OUTPUT in vars(arguments).values()
    with redirect_stdout(sys.stderr) if has_file else nullcontext():
        return int(arguments.run(arguments))


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line; a wrong argument ends it with the usage of its verb."""
    if argv and not argv[0].startswith('-') and argv[0] not in (verbs := _verbs()):
        from vla_runtime.files.typed_yaml import did_you_mean

        missing = _missing_packages()
        build_parser(['info']).error(
            f"'{argv[0]}' is no verb{did_you_mean(argv[0], verbs)}{missing and f'; {missing}'}"
        )
    arguments, unknown = build_parser(argv).parse_known_args(argv)
    if unknown:
        # Needs a package that a verb may say is missing.
        from vla_runtime.files.typed_yaml import did_you_mean

        parser: argparse.ArgumentParser = arguments.parser
        options = [word.partition('=')[0] for word in unknown if word.startswith('-')]
        mend = did_you_mean(options[0], parser._option_string_actions) if options else ''
        parser.error(f'unrecognized arguments: {" ".join(unknown)}{mend}')
    return arguments


def _complete() -> None:
    """Answer a shell that asks for completions, and end; argcomplete gives it the variable."""
    if '_ARGCOMPLETE' not in os.environ:
        return
    try:
        import argcomplete
    except ModuleNotFoundError:
        sys.exit(1)
    words = os.environ.get('COMP_LINE', '').split()
    argcomplete.autocomplete(build_parser(words[1:2]))


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='vla_runtime',
        description='Carry a vision-language-action policy from a checkpoint to a moving robot.',
        epilog=_missing_packages(),
    )
    parser.add_argument('--version', action='version', version=f'vla_runtime {__version__}')
    verbs = parser.add_subparsers(title='verbs', metavar='VERB', required=True)
    known = _verbs()
    # Only the verb in hand is imported: what another one lacks does not get in its way.
    chosen = [argv[0]] if argv and argv[0] in known else list(known)
    for verb in chosen:
        module = importlib.import_module(known[verb])
        _add_verb(verbs, verb, module)
    return parser


def _verbs() -> dict[str, str]:
    """Verb to full name of its module, by name of the verb."""
    folders = [f'{package}.cli' for package in _PACKAGES if _is_here(package)]
    found = {
        module.name.replace('_', '-'): f'{folder}.{module.name}'
        for folder in folders
        for module in pkgutil.iter_modules(importlib.import_module(folder).__path__)
        if module.name != 'main' and not module.name.startswith('_')
    }
    return dict(sorted(found.items()))


def _is_here(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:
        # It hides the signal from this process.
        return False


def _missing_packages() -> str:
    """Say which packages with verbs are not installed; empty where all are."""
    missing = [package for package in _PACKAGES if not _is_here(package)]
    if not missing:
        return ''
    return f'more verbs are in {" and ".join(missing)}, not installed here: {_INSTALL}'


def _add_verb(verbs: argparse._SubParsersAction, verb: str, module: ModuleType) -> None:
    summary, _, rest = (module.__doc__ or '').partition('\n')
    parser = verbs.add_parser(
        verb,
        help=summary,
        description=summary,
        epilog=rest.strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    parser.set_defaults(run=module.main, parser=parser)
