"""Tables whose parties hold different views of the same rows: the sets that FedHSSL is tried on."""
