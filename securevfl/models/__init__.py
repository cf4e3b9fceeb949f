"""Model families: plain PyTorch, without transport, cryptography or accounting."""
