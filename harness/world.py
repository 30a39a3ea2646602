"""Several processes that work on one cell together, as ``accelerate launch`` starts them.

Each of them holds the policy and knows every episode. What is costly is dealt out and brought together again: episodes,
analyses, scores and the micro-batches of an update, whose gradients add up to those of one process. So the results do
not depend on how many processes there are, up to the rounding of sums. The first process alone writes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from harness.contracts import HarnessError
from harness.store import CellDir, Checkpoint

T = TypeVar("T")

PATIENCE = timedelta(hours=4)
"""How long a process waits for the others: one of them may play much longer episodes."""

BUCKET = 2**26
"""Gradients that travel at a time, in numbers."""


@dataclass(frozen=True)
class World:
    """Who this process is among those that share a cell.

    Attributes:
        rank: Number of this process; process 0 writes.
        size: How many there are.
        sharded: Whether the trained weights, their gradients and the optimizer's state are split over them (FSDP2).
    """

    rank: int = 0
    size: int = 1
    sharded: bool = False

    @property
    def main(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def mine(self, items: Sequence[T]) -> list[T]:
        """This process's share of the work: every ``size``-th item."""
        return list(items[self.rank :: self.size])

    def collect(self, mine: Sequence[T]) -> list[T]:
        """What came of all shares that ``mine`` dealt out, in the order of the whole."""
        if self.size == 1:
            return list(mine)
        shares = self._gather(list(mine))
        return [shares[i % self.size][i // self.size] for i in range(sum(map(len, shares)))]

    def total(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Sums over all processes, by name."""
        if self.size == 1:
            return dict(numbers)
        shares = self._gather(dict(numbers))
        names = dict.fromkeys(name for share in shares for name in share)
        return {name: sum(share.get(name, 0.0) for share in shares) for name in names}

    def once(self, work: Callable[[], T]) -> T:
        """What the first process's ``work`` returns; the others do not do it."""
        if self.size == 1:
            return work()
        import torch.distributed as dist

        values: list[Any] = [work() if self.main else None]
        dist.broadcast_object_list(values, src=0)
        first: T = values[0]
        return first

    def wait(self) -> None:
        """Go on when all processes have come here."""
        if self.size > 1:
            self._gather(None)

    def leave(self) -> None:
        """Part from the others when all are done.

        A process that ends while gloo's threads still hold its tensors may be aborted by them, after all its work.
        """
        self.wait()
        if self.size > 1:
            import torch.distributed as dist

            dist.destroy_process_group()

    def deal(self, parts: Sequence[T]) -> list[tuple[T, bool]]:
        """This process's micro-batches, and whether each counts.

        A pass over sharded weights needs all processes, so that there every process makes equally many: those without
        another micro-batch repeat the first for nothing.
        """
        mine = [(part, True) for part in self.mine(parts)]
        if self.sharded:
            mine += [(parts[0], False)] * (-(-len(parts) // self.size) - len(mine))
        return mine

    def add_gradients(self, parameters: Sequence[Any]) -> None:
        """Replace every gradient by its sum over the processes; one that no process has stays away.

        Gradients of sharded weights have been added up in the backward pass.
        """
        if self.size == 1 or self.sharded:
            return
        import torch
        import torch.distributed as dist

        known = self._gather([parameter.grad is not None for parameter in parameters])
        moved = [parameter for parameter, *has in zip(parameters, *known, strict=True) if any(has)]
        for parameter in moved:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in _buckets(moved):
            flat = torch.cat([parameter.grad.flatten() for parameter in bucket])
            dist.all_reduce(flat)
            for parameter, summed in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.grad.copy_(summed.view_as(parameter))

    def _gather(self, value: T) -> list[T]:
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values


def _buckets(parameters: Sequence[Any]) -> Iterator[list[Any]]:
    """Runs of parameters with at most ``BUCKET`` numbers and one type; a larger parameter is a run of its own."""
    bucket: list[Any] = []
    for parameter in parameters:
        full = sum(one.numel() for one in bucket) + parameter.numel() > BUCKET
        if bucket and (full or bucket[0].dtype != parameter.dtype):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket


@cache
def current_world() -> World:
    """The processes that this one was started with; itself alone unless a launcher says otherwise.

    Raises HarnessError for environment variables that no launcher sets: who waits for such processes waits for hours.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if size == "1":
        return World()
    rank = os.environ.get("RANK", "")
    if not (size.isdecimal() and rank.isdecimal() and int(rank) < int(size) and "MASTER_ADDR" in os.environ):
        raise HarnessError(
            f"WORLD_SIZE={size} and RANK={rank} are not those of accelerate launch; unset them, or start it by "
            "accelerate launch -m harness run RECIPE"
        )
    import torch
    from accelerate import PartialState

    state = PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE)
    return World(state.process_index, state.num_processes, os.environ.get("ACCELERATE_USE_FSDP") == "true")


class Onlooker(CellDir):
    """The directory of a cell as all processes but the first have it: read, never written."""

    @contextmanager
    def lock(self) -> Iterator[None]:
        yield

    def write_json(self, name: str, value: Any) -> None:
        pass

    def append(self, name: str, *records: Mapping[str, Any]) -> None:
        pass

    def rewrite(self, name: str, records: Any) -> None:
        pass

    def rewind(self, checkpoint: Checkpoint | None) -> None:
        pass

    def finish(self, manifest: Mapping[str, Any]) -> None:
        pass


def directory_of(cell: CellDir, world: World) -> CellDir:
    """A cell's directory for this process."""
    return cell if world.main else Onlooker(Path(cell.path))
