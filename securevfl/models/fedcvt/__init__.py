"""FedCVT: cross-view training of two parties with estimates of missing representations."""
