"""Data: arrays in memory (`sources`), sets whose owners are known (`natural`, `text`, `leaf`), who gets what
(`partition`), which rows at step t (`batches`)."""

from qupel.data import leaf, natural, text  # they register themselves
from qupel.data.sources import Arrays, Dataset, load

__all__ = ["Arrays", "Dataset", "leaf", "load", "natural", "text"]
