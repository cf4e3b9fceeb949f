"""FedHSSL: self-supervised pretraining across parties and inside each, then fine-tuning."""
