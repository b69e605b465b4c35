"""The row cache by itself."""

from __future__ import annotations

import gc
import weakref

import torch

from lossyspec.kv_cache import RowCache


def test_a_cache_is_freed_with_its_last_user() -> None:
    cache = RowCache(2, 4)
    cache.place([0], 1, torch.device("cpu"))
    keys, _ = cache.update(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2), 0)
    held, whole = weakref.ref(cache.layers[0]), weakref.ref(cache)
    gc.disable()  # it must not take the collector: the next batch's cache may come long before it runs
    try:
        del cache, keys
        assert whole() is None and held() is None
    finally:
        gc.enable()
