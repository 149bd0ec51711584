"""The four parts of a federated method, one file each; see `base`."""
