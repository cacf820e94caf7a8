"""The tables of an exchange: each rank gets the rows that it reads, on any rank."""

import random

import pytest
import torch

from maskfx.distributed.division.tables import exchange_tables, merge_tables, read_part


@pytest.mark.parametrize("seed", range(20))
def test_each_rank_gets_what_it_reads(seed: int) -> None:
    rng = random.Random(seed)
    ranks, total = rng.randint(1, 4), rng.randint(1, 12)
    held = [[g for g in range(total) if rng.random() < 0.4] for _ in range(ranks)]
    for g in range(total):  # every row is somewhere
        if not any(g in own for own in held):
            held[rng.randrange(ranks)].append(g)
    have = [torch.tensor(sorted(own), dtype=torch.long) for own in held]
    needed = [
        torch.tensor([g for g in range(total) if rng.random() < 0.6], dtype=torch.long)
        for _ in range(ranks)
    ]
    tables = [exchange_tables(have, needed, rank, total) for rank in range(ranks)]
    sent = [
        list(have[rank][send].split(counts[0].tolist()))
        for rank, (send, counts, _) in enumerate(tables)
    ]
    for rank, (_, counts, order) in enumerate(tables):
        received = [sent[other][rank] for other in range(ranks)]
        assert list(map(len, received)) == counts[1].tolist()
        assert len(sent[rank][rank]) == 0
        assert torch.equal(torch.cat([have[rank], *received])[order], needed[rank])


@pytest.mark.parametrize("seed", range(10))
def test_each_rank_gets_every_partial_result_of_its_queries(seed: int) -> None:
    rng = random.Random(seed)
    ranks, total = rng.randint(1, 4), rng.randint(1, 9)
    cuts = sorted(rng.randint(0, total) for _ in range(ranks - 1))
    ends = [0, *cuts, total]
    held = [torch.arange(a, b) for a, b in zip(ends, ends[1:], strict=False)]
    read = [torch.arange(total) for _ in range(ranks)]
    tables = [merge_tables(held, read, rank, total) for rank in range(ranks)]
    # the partial result of query g on rank r is 100 r + g
    values = [read[rank] + 100 * rank for rank in range(ranks)]
    sent = [
        list(values[rank][send].split(counts[0].tolist()))
        for rank, (send, counts, _) in enumerate(tables)
    ]
    for rank, (_, _, order) in enumerate(tables):
        received = [sent[other][rank] for other in range(ranks)]
        found = torch.cat([values[rank], *received, torch.tensor([-1])])[order]
        assert torch.equal(found, held[rank] + 100 * torch.arange(ranks)[:, None])


def test_a_part_of_a_table_reads_what_its_places_name() -> None:
    table = torch.tensor([[0, 3], [7, 5], [3, 9]])  # of 5 rows, 4 cached rows and the zero row
    read = read_part(table, 5, 4)
    assert read.rows.tolist() == [0, 3]
    assert read.extra.tolist() == [0, 2]
    assert read.table.tolist() == [[0, 1], [3, 2], [1, 4]]
