"""LruCache: the least recently used entry is evicted."""

from maskfx.ir.lru import LruCache


def test_evicts_what_was_not_used_for_longest() -> None:
    cache: LruCache[str, int] = LruCache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    assert cache.put("c", 3) == 3
    assert cache.items() == [("a", 1), ("c", 3)]
    cache.put("a", 4)
    cache.put("d", 5)
    assert cache.items() == [("a", 4), ("d", 5)]
    assert cache.get("b") is None


def test_makes_an_entry_once_even_if_it_is_none() -> None:
    cache: LruCache[str, None] = LruCache(2)
    made = []
    for key in ("a", "b", "a", "c", "a", "b"):
        cache.find(key, lambda key=key: made.append(key))  # type: ignore[misc]
    assert made == ["a", "b", "c", "b"], "only b was evicted"


def test_keeps_only_some_keys() -> None:
    cache: LruCache[str, int] = LruCache(3)
    for number, key in enumerate("abc"):
        cache.put(key, number)
    cache.keep_only({"a", "c", "d"})
    assert list(cache) == ["a", "c"]
    cache.clear()
    assert len(cache) == 0
