"""Random numbers named by integers: the same key gives the same numbers in any batch, order or process."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def uniforms(key: tuple[int, ...], count: int) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) that depend on the key alone; a longer draw begins with the shorter one."""
    name = repr(tuple(int(part) for part in key)).encode()
    seed = int.from_bytes(hashlib.sha256(name).digest()[:16], "little")
    return np.random.Generator(np.random.Philox(key=seed)).random(count)
