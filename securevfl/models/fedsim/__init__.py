"""FedSim: similarities decide how a row's links are weighed, ordered and merged."""
