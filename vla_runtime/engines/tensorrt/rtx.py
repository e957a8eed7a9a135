"""All that TensorRT for RTX has and the others have not.

It builds without a GPU, for compute capabilities that it is told. Kernels for products are compiled
on the GPU, and kept in a file.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vla_runtime.files.atomic_write import write_bytes

# --- Compute capabilities of GPUs that multiply in few bits


# By precision: the first capability, and what its products are called.
_FIRST = {
    'fp8': ((8, 9), '8-bit floating point'),
    'nvfp4': ((10, 0), '4-bit floating point'),
}


def lacking_products(precision: str, capability: str) -> str:
    """Return which products a GPU (capability such as `8.9`) lacks for a precision, or ''."""
    if precision not in _FIRST:
        return ''
    first, name = _FIRST[precision]
    major, _, minor = capability.partition('.')
    if (int(major), int(minor)) >= first:
        return ''
    return f'has no products in {name} ({precision}), which come with {first[0]}.{first[1]}'


# --------------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)

# The package's own name, and that of the wheel with its bindings alone.
RTX_MODULES = ('tensorrt_rtx', 'tensorrt_rtx_bindings')
# Compute capabilities that our graphs are built for.
TARGETS = ('sm80', 'sm86', 'sm89', 'sm120', 'sm121')
# Known to it, and no use to us: our graphs have float32 products in every precision.
_TURING = 'TensorRT for RTX multiplies no float32 matrices on 7.5 (Turing); install TensorRT there'
# GPUs that people have, and that TensorRT alone serves.
_TENSORRT_ALONE = {
    'sm72': '7.2 (Xavier)',
    'sm87': '8.7 (Orin)',
    'sm90': '9.0 (Hopper)',
    'sm100': '10.0 (Blackwell of data centres)',
    'sm101': '10.1 (Thor)',
    'sm103': '10.3 (Blackwell of data centres)',
    'sm110': '11.0 (Thor)',
}


def parse_targets(text: str) -> tuple[str, ...]:
    """Return the targets of a list such as `sm120,8.6`: (sm86, sm120) (ValueError: none)."""
    words = [word.strip().lower() for word in text.split(',')]
    if not all(words):
        fault = 'a name is missing beside a comma' if any(words) else 'none is named'
        raise ValueError(f'targets {text!r}: {fault}; write for example {",".join(TARGETS[1:3])}')
    named = {re.sub(r'^(?:sm_?)?(\d+)\.?(\d)$', r'sm\1\2', word) for word in words}
    check_targets(tuple(sorted(named)))
    return ordered(named)


def ordered(targets: Iterable[str]) -> tuple[str, ...]:
    """Return targets from the oldest on, so that one set has one folder."""
    return tuple(sorted(targets, key=TARGETS.index))


def check_gpu(name: str, capability: str) -> None:
    if target_of(capability) not in TARGETS:
        raise ValueError(
            f'TensorRT for RTX does not serve this GPU ({name}, {capability}); install TensorRT '
            f'(it serves {", ".join(map(_capability, TARGETS))})'
        )


def check_targets(targets: tuple[str, ...], precision: str = 'float32') -> None:
    """Refuse compute capabilities (`sm89`) that our graphs cannot be built for (ValueError)."""
    for target in targets:
        if target not in TARGETS:
            why = 'TensorRT for RTX builds for no such compute capability'
            if target == 'sm75':
                why = _TURING
            elif gpu := _TENSORRT_ALONE.get(target):
                why = f'TensorRT for RTX does not serve {gpu}; install TensorRT there'
            raise ValueError(f"target '{target}': {why}; it can be {', '.join(TARGETS)}")
        if lacks := lacking_products(precision, _capability(target)):
            able = [one for one in TARGETS if not lacking_products(precision, _capability(one))]
            raise ValueError(
                f"target '{target}': {lacks}; it can be {', '.join(able)}, or export in int8"
            )


def _capability(target: str) -> str:
    return f'{target[2:-1]}.{target[-1]}'


def target_of(capability: str) -> str:
    """Return the target of a compute capability: `sm89` for `8.9`."""
    return f'sm{capability.replace(".", "")}'


class CompiledKernels:
    """Kernels that were compiled on the GPU, kept in a file from one load to the next.

    A file of another GPU, driver or version is begun anew.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cache: Any = None

    def of(self, config: Any) -> Any:
        """Return TensorRT's cache, one for all contexts; `config` is any context's settings."""
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            if self._path.is_file() and not self._cache.deserialize(self._path.read_bytes()):
                logger.info('%s: is of another GPU, driver or version; begun anew', self._path)
        return self._cache

    def save(self) -> None:
        """Write the file; where that is not possible the next load compiles again."""
        if self._cache is None:
            return
        data = bytes(self._cache.serialize())
        try:
            if not self._path.is_file() or self._path.read_bytes() != data:
                write_bytes(self._path, memoryview(data))
        except OSError as error:
            logger.warning('%s: cannot be written, so each load compiles: %s', self._path, error)


def configure_build(trt: Any, config: Any, targets: tuple[str, ...]) -> None:
    """Set what to build for; kernels are chosen on the GPU, so there are no times to keep."""
    check_targets(targets)
    # Scratch memory of its own would keep a graph from being captured.
    config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    # The log then lists the kernels, and with them the types that they multiply in.
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.num_compute_capabilities = len(targets)
    for index, target in enumerate(targets):
        config.set_compute_capability(getattr(trt.ComputeCapability, target.upper()), index)


def runtime_config(trt: Any, engine: Any, compiled: CompiledKernels | None) -> Any:
    """Return the settings of a context.

    Kernels for a shape are made before its first run and stay: by default they are replaced while a
    policy runs, and a chunk's last bits with them.
    """
    config = engine.create_runtime_config()
    config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED
    kernels = trt.DynamicShapesKernelSpecializationStrategy
    config.dynamic_shapes_kernel_specialization_strategy = kernels.EAGER
    memory = trt.ExecutionContextAllocationStrategy.USER_MANAGED
    config.set_execution_context_allocation_strategy(memory)
    if compiled is not None:
        config.set_runtime_cache(compiled.of(config))
    return config
