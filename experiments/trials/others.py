"""Owners of a natural data set after the first so many, who take no part in what is reported, to choose settings on.

[data]
name = "others:load"
args = {name = "mnist_writers", skip = 100, count = 150, every = "writers"}
"""

import numpy as np

from qupel.data.sources import datasets


def load(name, skip, count, every, **settings):
    """A client for each, name -> (train inputs, targets, test inputs, targets). every: the set's word for how many."""
    data = datasets[name](None, None, **{every: skip + count}, **settings)
    found = {}
    for k in range(skip, skip + count):
        parts = (s.read(np.flatnonzero(s.groups == k)) for s in (data.train, data.test))
        found[data.owners[k]] = tuple(a for part in parts for a in (part.inputs, part.targets))
    return found
