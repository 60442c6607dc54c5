"""Memory is used again once no array holds it."""

from preblock.service.runtime.buffer_pool import CACHE_LINE, MAX_BYTES, MAX_FREE, BufferPool
from preblock.service.runtime.runner import Float32


def address(values: Float32) -> int:
    return int(values.__array_interface__["data"][0])


def test_memory_is_reused_only_without_views() -> None:
    pool = BufferPool()
    first = pool.take((1, 200, 64))
    view, place = first[:, 1:, ::2], address(first)
    view[...] = 5
    del first
    assert place % CACHE_LINE == 0
    assert address(pool.take((1, 200, 64))) != place
    assert (view == 5).all()
    del view
    held = [pool.take((2, 100, 64)) for _ in range(2)]
    assert place in {address(values) for values in held}


def test_pool_keeps_bounded_free_memory() -> None:
    pool = BufferPool()
    held = [pool.take((1, 1024, 2)) for _ in range(3 * MAX_FREE)]
    held += [pool.take((MAX_BYTES,)) for _ in range(2)]
    del held
    assert {size: len(free) for size, free in pool._free.items() if free} == {8192: MAX_FREE}
