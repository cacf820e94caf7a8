"""Object stores in memory that fail, hang or count what is asked of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from obstore.store import MemoryStore

from maskfx.runtime.cache.stores.bounded_calls import RemoteAccess
from maskfx.runtime.cache.stores.objects import ObjectInfo, Objects
from maskfx.runtime.cache.stores.remote_store import RemoteStore

URL = "memory:///test"


@dataclass
class Faults:
    """What happens to the calls, by name of the operation; "*" means all of them."""

    failing: set[str] = field(default_factory=set)
    hanging: set[str] = field(default_factory=set)
    calls: Counter[str] = field(default_factory=Counter)

    async def check(self, name: str) -> None:
        self.calls[name] += 1
        if {name, "*"} & self.failing:
            raise ConnectionError(f"{name}: the store is out of order")
        if {name, "*"} & self.hanging:
            await asyncio.sleep(1000)


class FaultyObjects(Objects):
    """Objects whose operations fail or hang as set in `faults`."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        super().__init__(MemoryStore() if store is None else store, URL)
        self.faults = Faults()
        self.order: list[str] = []  # names of objects that were written or removed

    async def put(self, name: str, data: bytes | memoryview) -> None:
        await self.faults.check("put")
        await super().put(name, data)
        self.order.append(name)

    async def put_new(self, name: str, data: bytes) -> bool:
        await self.faults.check("put")
        return await super().put_new(name, data)

    async def get(self, name: str, most: int) -> tuple[ObjectInfo, bytes] | None:
        await self.faults.check("get")
        return await super().get(name, most)

    async def read(self, name: str, start: int, end: int) -> memoryview | None:
        await self.faults.check("read")
        return await super().read(name, start, end)

    async def status(self, name: str) -> ObjectInfo | None:
        await self.faults.check("status")
        return await super().status(name)

    async def names(self, folder: str) -> list[ObjectInfo]:
        await self.faults.check("names")
        return await super().names(folder)

    async def remove(self, name: str) -> None:
        await self.faults.check("remove")
        await super().remove(name)
        self.order.append(name)


def remote(objects: Objects, seconds: float = 5.0, pause: float = 30.0, **options: Any):
    """A store over these objects; each has calls of its own, as in a process of its own."""
    access = RemoteAccess.of(objects, seconds, pause)
    return RemoteStore(objects.url, access=access, **{"looked_after": 0.0, **options})


def run(objects: Objects, call: Callable[[], Awaitable[Any]]) -> Any:
    """The result of a call of the objects, from a test."""

    async def awaited() -> Any:
        return await call()

    return RemoteAccess.of(objects).reads.run(awaited)
