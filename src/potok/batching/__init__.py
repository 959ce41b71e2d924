"""Request-level dynamic batching for any function that takes a list."""

from potok.batching.batcher import BatcherStats, DynamicBatcher

__all__ = ["BatcherStats", "DynamicBatcher"]
