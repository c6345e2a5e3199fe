"""How a dataset is divided over workers and replicas, and how its rows reach the devices."""
