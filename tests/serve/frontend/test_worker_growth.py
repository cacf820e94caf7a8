"""A long queue gets more workers, an idle server fewer; real workers, on this machine."""

from __future__ import annotations

import asyncio

from maskfx.serve.config import RaySettings, ServeSettings
from tests.serve.fronts import eventually, fronted, made, processes, request, run

LONG = "fake:seconds_per_step=0.05,steps=6"


def test_workers_come_with_the_queue_and_go_with_it() -> None:
    async def test() -> None:
        ray = RaySettings(max_workers=3, grow_seconds=0.2, shrink_seconds=0.3)
        told = ServeSettings(model=LONG, max_num_seqs=1, executor="ray", ray=ray)
        async with fronted(told=told) as front:
            tasks = [asyncio.create_task(made(front, request(str(k)))) for k in range(30)]
            await eventually(lambda: front.health().workers == 3)
            assert {one.tries for one in await asyncio.gather(*tasks)} == {1}
            await eventually(lambda: front.health().workers == 1)
            await eventually(lambda: len(processes(front)) == 1)
            text = front.metrics().decode()
            assert 'maskfx_workers{node="local"} 1.0' in text
            assert 'maskfx_workers_lost_total{node="local"} 0.0' in text
            assert "maskfx_worker_restarts_total 0.0" in text
            assert (await made(front, request())).tries == 1

    run(test())
