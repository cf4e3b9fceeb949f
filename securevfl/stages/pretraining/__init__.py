"""Self-supervised pretraining of encoders (FedHSSL): the stage before supervised rounds."""
