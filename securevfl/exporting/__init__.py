"""A party's half of a trained network as a file that other programs run: ONNX or TorchScript."""
