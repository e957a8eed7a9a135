"""From a bundle's weights to a PyTorch engine, with the head's layers chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vla_runtime.engines.torch.engine import TorchEngine
from vla_runtime.engines.torch.token_engine import TorchTokenEngine
from vla_runtime.engines.torch.weights import load_network
from vla_runtime.engines.triton_option import OFF
from vla_runtime.family.declaration import PolicyDims
from vla_runtime.models.base.token_network import TokenNetwork


def load_torch_engine(
    family: str,
    dims: PolicyDims,
    weights: Path,
    *,
    device: str,
    precision: str,
    max_rows: int,
    use_cuda_graphs: bool,
    triton: str = OFF,
    action_times: bool = False,
) -> TorchEngine:
    """Build the network from a bundle's weights file, straight onto the device; see `load_network`.

    With `action_times` the policy was trained for actions with flow times of their own.

    Raises:
        ValueError: unknown device or precision, no CUDA here, not enough memory, or weights that do
            not fit the dimensions.
    """
    try:
        network = load_network(family, dims, weights, device=device, precision=precision)
        options: dict[str, Any] = {'max_rows': max_rows, 'use_cuda_graphs': use_cuda_graphs}
        if isinstance(network, TokenNetwork):
            engine: TorchEngine = TorchTokenEngine(network, **options)
        else:
            engine = TorchEngine(network, **options)
        if triton != OFF:
            from vla_runtime.engines.torch.layer_trial import choose_layers

            choose_layers(engine, precision, action_times=action_times)
        return engine
    except RuntimeError as error:
        if 'memory' not in str(error):
            raise
        raise ValueError(
            f"device '{device}': not enough memory for {weights} in {precision} and its "
            f'buffers; choose a smaller precision or another device. {error}'
        ) from error
