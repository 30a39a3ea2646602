"""Cells on a Ray cluster of two nodes on this machine: the same numbers, whatever is lost meanwhile."""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from node_cells import hold, load_cells, load_stub
from rich.console import Console
from toy_cells import run_toy, toy_config, toy_policy

from harness import cluster as cluster_module
from harness import nodes
from harness.cli import main
from harness.cluster import TRIES, capacity, on_ray
from harness.config import CellConfig, Needs
from harness.contracts import HarnessError
from harness.nodes import Home, home, unfit
from harness.progress import Progress
from harness.recipes import load_recipe
from harness.runner import Event, Failure, Note, Play
from harness.store import cell_dir
from harness.verify import compare

CPU = Needs(cpus=1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head, which is the driver's node, and a node that pretends to have two GPUs. No Ray listens elsewhere."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    # Ray replaces 127.0.0.1, not its neighbours, by an address that other machines can reach.
    usual = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "node_ip_address": "127.0.0.2"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))  # where nodes find what this file tells them to do
        found = Cluster(initialize_head=True, head_node_args={**usual, "include_dashboard": False})
        found.second = found.add_node(**usual, num_gpus=2)
        yield found
        found.shutdown()


@pytest.fixture
def joined(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The cluster as RAY_ADDRESS names it. Its nodes look at code that nobody edits while the tests run."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    monkeypatch.setattr(nodes, "code_packages", lambda env_ids: ("yaml",))
    return cluster


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> list[CellConfig]:
    policy = tmp_path_factory.mktemp("policy") / "toy"
    toy_policy().save(policy)
    return [toy_config(policy, "grpo", updates=2).model_copy(update={"seed": seed}) for seed in (1, 2)]


def place(directory: Path, load: Callable[[], Play], needs: Needs = CPU, jobs: int | None = None) -> Any:
    return on_ray(needs, directory, jobs, Console(file=io.StringIO()), load)


def last(events: list[tuple[CellConfig, Event]]) -> dict[str, Event]:
    return {cell.hash: event for cell, event in events}


# ------------------------------------------------------------------------------------------------- the tests


@pytest.mark.slow
def test_each_cell_sees_its_own_gpu_or_none(joined: Any, toy: list[CellConfig], tmp_path: Path) -> None:
    for name, needs, expected in (("gpu", Needs(cpus=0.5, gpus=1), ["0", "1"]), ("cpu", CPU, ["", ""])):
        events = list(place(tmp_path / name, load_stub, needs)(toy))
        assert last(events) == {cell.hash: None for cell in toy}
        assert sorted(cell_dir(tmp_path / name, cell).read_json("seen.json")["gpus"] for cell in toy) == expected
        assert any(event == Note("something odd") for _, event in events)


@pytest.mark.slow
def test_what_cannot_run_is_refused_at_once(
    joined: Any, toy: list[CellConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = r"a cell needs 1 CPU and 3 GPUs \(needs.cpus, needs.gpus\), but the largest node has 1 CPU and 2 GPUs"
    with pytest.raises(HarnessError, match=message):
        next(place(tmp_path, load_stub, Needs(gpus=3))(toy))
    monkeypatch.setattr(nodes, "code_digest", lambda packages: "another")
    with pytest.raises(HarnessError, match="has other code of yaml, or it was changed"):
        next(place(tmp_path, load_stub)(toy))


@pytest.mark.slow
def test_a_process_that_always_dies_is_a_failure_in_the_end(joined: Any, toy: list[CellConfig], tmp_path: Path) -> None:
    events = [event for _, event in place(tmp_path, partial(load_stub, "kill"))(toy[:1])]
    notes = [event.text for event in events if isinstance(event, Note) and event.text != "something odd"]
    assert [note.partition(";")[2] for note in notes] == [
        f" it goes on from its last checkpoint, try {number} of {TRIES}" for number in range(2, TRIES + 1)
    ]
    cause = "its process died (out of memory?), as in 2 tries before"
    assert events[-1] == Failure(toy[0].title, cause, user_error=False)


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["hang", "deaf"])
def test_to_stop_listening_ends_the_cells(joined: Any, toy: list[CellConfig], tmp_path: Path, trouble: str) -> None:
    """This is what Ctrl-C comes to, also for cells that do not heed it: they can be run again at once."""
    events = place(tmp_path, partial(load_stub, trouble))(toy)
    heard = {cell.hash for cell, event in (next(events) for _ in range(4)) if isinstance(event, Progress)}
    assert heard == {cell.hash for cell in toy}
    holders = [int((cell_dir(tmp_path, cell).path / "lock").read_text().split()[0]) for cell in toy]
    events.close()
    for cell, holder in zip(toy, holders, strict=True):
        with cell_dir(tmp_path, cell).lock():
            assert not (cell_dir(tmp_path, cell).path / "seen.json").exists()
        assert not Path(f"/proc/{holder}").exists() or "IDLE" in Path(f"/proc/{holder}/cmdline").read_text()


def test_a_lost_cell_is_taken_over_from_a_holder_that_lives(
    toy: list[CellConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that is cut off may go on, and its file server may keep its locks."""
    monkeypatch.setattr(pytest.importorskip("ray"), "get", lambda answer: answer)
    monkeypatch.setattr(cluster_module, "unfit", lambda origin: "")
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):  # which the cell sets: put back in the end
        monkeypatch.setenv(name, "1")
    remote = SimpleNamespace(remote=lambda *said: None)
    mailbox = SimpleNamespace(put=remote, flush=remote)
    job = cluster_module._Job(load_stub, tmp_path, Home(tmp_path, "", (), settings={"OMP_NUM_THREADS": "3"}), gpu=False)
    config, place = toy[0].model_dump_json(), cell_dir(tmp_path, toy[0])
    holder = multiprocessing.get_context("spawn").Process(target=hold, args=(place.path,), daemon=True)
    holder.start()
    while not (place.path / "writer").exists():
        assert holder.is_alive()
        time.sleep(0.05)
    refused = cluster_module._play(job, config, False, mailbox, ("", 1))
    assert isinstance(refused, Failure)
    assert "is in use by another process" in refused.cause
    assert cluster_module._play(job, config, True, mailbox, ("", 2)) is None
    assert os.environ["OMP_NUM_THREADS"] == "3"
    holder.kill()


@pytest.mark.slow
def test_a_lost_node_costs_time_and_no_number(joined: Any, toy: list[CellConfig], tmp_path: Path) -> None:
    """Comes last: it leaves the cluster with one node."""
    expected = [run_toy(config, tmp_path / "here" / config.hash) for config in toy]
    trained: dict[str, int] = {}
    events = []
    for cell, event in place(tmp_path / "run", partial(load_cells, joined.second.node_id))(toy):
        events.append((cell, event))
        if isinstance(event, Progress) and event.phase == "train":
            trained[cell.hash] = event.done
        if joined.second in joined.worker_nodes and len(trained) == 2 and min(trained.values()) == 1:
            joined.remove_node(joined.second, allow_graceful=False)
    (note,) = [event.text for _, event in events if isinstance(event, Note)]
    assert note == "its node was lost; it goes on from its last checkpoint, try 2 of 3"
    assert last(events) == {config.hash: None for config in toy}
    for config, cell in zip(toy, expected, strict=True):
        parts = compare(cell, cell_dir(tmp_path / "run", config))
        assert {part.name: part.difference for part in parts if part.difference} == {}
    assert not list((tmp_path / "run").glob(".token-*"))


# ------------------------------------------------------------------------------------------ without a cluster


def test_how_many_cells_fit() -> None:
    def fit(needs: Needs, cpus: float, gpus: float = 0) -> int:
        node = {"NodeID": "a", "Alive": True, "Resources": {"CPU": cpus, "GPU": gpus}}
        gone = {"NodeID": "b", "Alive": False, "Resources": {}}
        return capacity([node, gone], needs).get("a", 0)

    assert fit(Needs(), 8) == 8
    assert fit(Needs(cpus=0.1), 1) == 10
    assert fit(Needs(cpus=4, gpus=1), 64, 8) == 8
    assert fit(Needs(cpus=16, gpus=1), 64, 8) == 4
    assert fit(Needs(gpus=0.4), 64, 8) == 16
    assert fit(Needs(gpus=2), 64, 7) == 3
    assert fit(Needs(gpus=1), 64) == 0


def test_a_node_must_have_the_same_directory_code_and_libraries(tmp_path: Path) -> None:
    with home(tmp_path, ["toy_envs:Doors"]) as here:
        assert {"harness", "envs_text", "envs_vision", "baselines", "toy_envs"} <= set(here.packages)
        here = replace(here, packages=("toy_envs",), code=nodes.code_digest(["toy_envs"]))
        assert unfit(here) == ""
        assert "has no /nowhere; start the harness in a directory that all nodes share" in unfit(
            replace(here, work=Path("/nowhere"))
        )
        assert "has other code of toy_envs" in unfit(replace(here, code="another"))
        assert "has torch 2" in unfit(replace(here, versions={**here.versions, "torch": "1.0"}))
        assert "has jax none" in unfit(replace(here, versions={**here.versions, "jax": "1.0"}))
    assert f"does not see {tmp_path}; --out must be on a file system that all nodes share" in unfit(here)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "no Ray cluster answers at RAY_ADDRESS=127.0.0.1:1: Connection refused"),
        ("ray://somewhere:10001", "RAY_ADDRESS must be auto or HOST:PORT of a cluster's head"),
        (None, "--cluster ray needs ray: pip install 'seed-harness[cluster]'"),
    ],
)
def test_no_cluster_is_one_line(
    address: str | None,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address or "127.0.0.1:1")
    if address is None:
        monkeypatch.setitem(sys.modules, "ray", None)
    arguments = ["run", "quick", "envs=[EZPoints-v1]", "methods=[]", "baselines=[random]", "--out", str(tmp_path)]
    assert main([*arguments, "--cluster", "ray"]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_parts_of_several_gpus_are_refused() -> None:
    with pytest.raises(HarnessError, match=r"needs: gpus must be a part of one or a whole number, not 1.5"):
        load_recipe("quick", ["needs.gpus=1.5"])


def test_a_cell_that_could_not_use_its_gpus_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["envs=[EZPoints-v1]", "methods=[]", "baselines=[random]"]
    assert main(["run", "quick", *few, "needs.gpus=8", "--cluster", "ray", "--out", str(tmp_path)]) == 2
    assert "needs.gpus=8: one process trains a cell under --cluster, and uses one GPU" in capsys.readouterr().err
