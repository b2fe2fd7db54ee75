"""FedAvg: one given network, trained by averages of weights."""
