"""What runs the stages: PyTorch on any device, or ONNX Runtime without torch."""
