"""The cache stays within its bytes, and lets no thread see half of a change."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from trireme.cache import SizedCache


def test_the_least_recently_used_go_past_the_limit() -> None:
    cache: SizedCache[int] = SizedCache(100)
    for name in ("a", "b", "c"):
        cache.put(name, ord(name), 40)
        cache.get("a")
    assert [cache.get(name) for name in "abc"] == [97, None, 99]
    cache.put("a", 1, 10)  # the same name again is no second value
    cache.put("d", 2, 40)
    assert [cache.get(name) for name in "acd"] == [1, 99, 2]
    cache.put("large", 3, 1000)
    assert [cache.get(name) for name in ("a", "large")] == [None, 3]
    cache.clear()
    assert cache.get("large") is None


def test_threads_share_it() -> None:
    cache: SizedCache[int] = SizedCache(50)

    def use(number: int) -> None:
        for n in range(2000):
            name = str((n * number) % 17)
            if cache.get(name) is None:
                cache.put(name, n, 10)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(use, number) for number in range(1, 9)]:
            done.result()
