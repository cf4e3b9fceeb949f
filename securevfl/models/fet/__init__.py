"""FeT, the Federated Transformer: attention over a row's links, keys as positions."""
