"""Data: arrays in memory (`sources`), who gets what (`partition`), which rows at step t (`batches`)."""

from qupel.data.sources import Arrays, Dataset, load

__all__ = ["Arrays", "Dataset", "load"]
