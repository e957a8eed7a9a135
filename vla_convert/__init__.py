"""Convert checkpoints to bundles, ONNX files and engines."""
