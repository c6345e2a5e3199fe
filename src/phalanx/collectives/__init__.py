"""Moving data between devices: cross-device operations, packing and the programs underneath."""
