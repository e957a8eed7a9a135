"""`torch.compile` of one call of plain modules, once and never again.

The plain modules are compiled, not the fused ones: the compiler fuses operators itself, and the
fused step, which overwrites complex views of shared buffers, is refused by it (torch 2.13). The
weights are shared, so that compiled networks need no further memory for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

logger = logging.getLogger(__name__)

Run = Callable[..., Any]
# Advice where no remedy is known.
SAYS_MORE = 'TORCH_LOGS=+dynamo,+inductor says more'
_TRITON = "install Triton for this PyTorch and GPU ('pip install triton')"
# What the text of an error has, and what mends it.
_REMEDIES = (
    ('working triton', _TRITON),
    ("no module named 'triton'", _TRITON),
    ('active driver', 'Triton needs a CUDA device'),
    ('python.h', "install Python's headers ('apt install python3-dev')"),
    ('c++ compile', "install a C++ compiler ('apt install g++')"),
    # What a load that was killed while it compiled leaves behind.
    (
        'file too short',
        "remove PyTorch's cache of compiled code (/tmp/torchinductor_USER, or the folder in "
        'TORCHINDUCTOR_CACHE_DIR)',
    ),
    ('c compiler', "install a C compiler ('apt install gcc')"),
)


class Compiled:
    """A call that is compiled when it is first made, and never again once it is sealed.

    Args:
        name: name of the network, for the log.
        call: call whose tensors have the same shapes every time.
    """

    def __init__(self, name: str, call: Run) -> None:
        self._name, self._sealed = name, False
        self._run: Run = torch.compile(
            _with_own_code(call), backend=self._compile, dynamic=False, fullgraph=True
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def seal(self) -> None:
        """Compile nothing from now on."""
        self._sealed = True

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Run:
        if not self._sealed:
            compiled: Run = torch._inductor.compile(graph, inputs)
            return compiled
        # Shapes never change. What PyTorch sets for the whole process may, such as its threads.
        logger.warning(
            'torch_compile: the %s network was compiled under other settings of PyTorch than are '
            'in force now, such as its number of threads: it runs eagerly. Load the policy again.',
            self._name,
        )
        return graph.forward


def remedy(error: str, otherwise: str = SAYS_MORE) -> str:
    """Return what mends an error of the compiler; `otherwise` where nothing is known to."""
    text = error.lower()
    for word, what in _REMEDIES:
        if word in text:
            return what
    return otherwise


def _with_own_code(call: Run) -> Run:
    """Return a function with a code object of its own.

    Dynamo keeps what it compiles by code object, tries all of it at each call, and has a limit for
    it. So every network and shape of every policy in the process has one.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return FunctionType(run.__code__.replace(), globals(), run.__name__, None, run.__closure__)
