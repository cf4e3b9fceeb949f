"""Self-supervised pretraining as a stage of a run, before anything supervised (FedHSSL)."""
