"""A network with the weights of a bundle, straight onto the device of a torch engine."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from vla_runtime.engines.devices import parse_device
from vla_runtime.family.declaration import PolicyDims
from vla_runtime.models.base.flow_network import FlowNetwork, empty_network
from vla_runtime.models.blocks.layers import matrix_names

# Dtype of the parameters that may be reduced.
PRECISIONS = {
    'float32': torch.float32,
    'bfloat16': torch.bfloat16,
    'float16': torch.float16,
}


def load_network(
    family: str, dims: PolicyDims, weights: Path, *, device: str, precision: str
) -> FlowNetwork:
    """Build the network from a bundle's weights file.

    `weights` has the network's own parameter names, in any float dtype; packed weights are bytes.

    Raises:
        ValueError: unknown device or precision, no CUDA here, or weights that do not fit the
            dimensions.
        RuntimeError: not enough memory.
    """
    if precision not in PRECISIONS:
        raise ValueError(
            f"precision '{precision}': PyTorch runs the networks in {', '.join(PRECISIONS)}; fewer "
            "bits are those of ONNX files ('vla_runtime export --onnx-precision'), which backend "
            "'tensorrt' runs (int8 on a CPU: 'onnxruntime')"
        )
    target = torch_device(device)
    if target.type == 'cuda':
        compute_in_full_precision()
    network = empty_network(family, dims)
    with safe_open(weights, framework='pt', device=str(target)) as file:
        names = file.keys()
        tensors = ((name, file.get_tensor(name)) for name in names)
        state = state_of(network, tensors, precision)
    try:
        network.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise ValueError(
            f'{weights}: does not fit the dimensions in policy.yaml: {error}'
        ) from error
    return network


def state_of(
    network: nn.Module, tensors: Iterable[tuple[str, Tensor]], precision: str
) -> dict[str, Tensor]:
    """Cast parameters one at a time: never a second copy of all. Packed weights stay as they are.

    The network's `load_state_dict` takes the result, with `assign`.
    """
    matrices = matrix_names(network)
    return {
        name: tensor.to(PRECISIONS[precision] if name in matrices else torch.float32)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in tensors
    }


def compute_in_full_precision() -> None:
    """Have CUDA's libraries compute and add up in the precision that is asked for."""
    # Of the whole process: PyTorch has no such setting of one network. By default convolutions are
    # in TF32 from Ampere on (a ResNet errs by 3e-3), and products in half precision may add up
    # their parts in half precision.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def torch_device(name: str) -> torch.device:
    """Return PyTorch's device of this name; ValueError where unknown or not available here."""
    kind, index = parse_device(name, 'torch')
    if kind == 'cuda':
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count <= index:
            raise ValueError(
                f"device '{name}': PyTorch {torch.__version__} sees {count} CUDA devices here; "
                'check the driver (nvidia-smi) and that PyTorch is a CUDA build, or use cpu'
            )
    return torch.device(name)
