"""Path of Triton for tests: installed, or beside the environment, where `./run test` puts it.

Beside, because PyTorch's CPU build would import it in every process that finds it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_BESIDE = Path(sys.prefix) / 'triton'
INSTALLED = importlib.util.find_spec('triton') is not None
needs_triton = pytest.mark.skipif(
    not (INSTALLED or (_BESIDE / 'triton').is_dir()),
    reason='Triton is neither installed nor beside the environment; ./run test puts it there',
)


@pytest.fixture(scope='module')
def interpreted() -> Iterator[None]:
    """Interpret the kernels in this process, on a CPU; a process that compiles them cannot."""
    imported = sys.modules.get('triton')
    if imported is not None and not _is_interpreted(imported):
        pytest.skip('this process imported Triton to compile; run these tests by themselves')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('TRITON_INTERPRET', '1')
        if not INSTALLED:
            patch.syspath_prepend(str(_BESIDE))
        _patch_language_once(patch)
        _leave_out_overflow_checks(patch)
        yield


def _patch_language_once(patch: pytest.MonkeyPatch) -> None:
    """Let the functions that a kernel calls find the language as the kernel's launch left it.

    The interpreter patches it anew for each call of each function, a third of all its time.
    """
    # Another Triton than the one beside the environment may patch otherwise.
    if not INSTALLED:
        import triton.language as tl
        from triton.runtime import interpreter

        real = interpreter._patch_lang

        def patch_language(function: Any) -> Any:
            seen = [v for v in function.__globals__.values() if v is tl or v is tl.core]
            if any(tl.core.is_builtin(language.load) for language in seen):
                return real(function)
            return interpreter._LangPatchScope()

        patch.setattr(interpreter, '_patch_lang', patch_language)


def _leave_out_overflow_checks(patch: pytest.MonkeyPatch) -> None:
    """Compute each sum and product of addresses once; the check for overflow does so twice more.

    Tensors of tests have a few thousand numbers.
    """
    if not INSTALLED:
        from triton.runtime import interpreter

        patch.setattr(
            interpreter.interpreter_builder,
            'options',
            interpreter.InterpreterOptions(sanitize_overflow=False),
        )


def _is_interpreted(triton: Any) -> bool:
    return type(triton.language.cdiv).__name__ == 'InterpretedFunction'


def make_importable() -> None:
    """Let this process import Triton from beside the environment, if need be."""
    if not INSTALLED:
        sys.path.append(str(_BESIDE))


class Launches:
    """Stands for a module of kernels, and hands each launch on instead of making it.

    Args:
        kernels: the module.
        launch: takes the kernel, its arguments and its options.
    """

    def __init__(self, kernels: Any, launch: Callable[[Any, tuple[Any, ...], Any], None]) -> None:
        self._kernels, self._launch = kernels, launch

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self._kernels, name)

        def launch(*args: Any, **options: Any) -> None:
            self._launch(kernel, args, options)

        # A kernel is launched as kernel[grid](...), whatever the grid.
        return defaultdict(lambda: launch)


def environment() -> dict[str, str]:
    """Environment of a process that can import Triton, to compile."""
    found = [] if INSTALLED else [str(_BESIDE)]
    paths = [os.environ.get('PYTHONPATH', ''), *found]
    rest = {name: value for name, value in os.environ.items() if name != 'TRITON_INTERPRET'}
    return {**rest, 'PYTHONPATH': os.pathsep.join(filter(None, paths))}
