"""What of a sequence's keys and values is kept: the full cache, and the heavy hitters of H2O."""

from h2o_flexgen.kv_cache.base import CacheRule, KVLayout, KVTensors
from h2o_flexgen.kv_cache.full import FullCache
from h2o_flexgen.kv_cache.heavy_hitter import HeavyHitterCache

__all__ = ["CacheRule", "FullCache", "HeavyHitterCache", "KVLayout", "KVTensors"]
