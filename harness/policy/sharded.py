"""A policy's twin whose weights, gradients and optimizer state are split over the processes of a world (FSDP2).

Playing, analysing and scoring without gradients stay with the whole policy that every process holds; only passes with
gradients run through the twin. After an update the twin's weights are copied back (:func:`take_back`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from harness.contracts import HarnessError
from harness.policy.local import LocalPolicy
from harness.policy.score import Row, Scores
from harness.world import World


class ShardedPolicy(LocalPolicy):
    """Scores with gradients; all processes must make equally many passes, at the same time."""

    def __init__(self, policy: LocalPolicy, world: World) -> None:
        twin = policy.clone()
        super().__init__(twin.model, policy.tokenizer, policy.image_processor, policy.spec, policy.prompt_style)
        self.share_encodings(policy)
        self.precision, self.adapters = twin.precision, twin.adapters
        for mine, theirs in zip(self.model.parameters(), policy.model.parameters(), strict=True):
            mine.requires_grad_(theirs.requires_grad)
        if policy.checkpointing:
            self.checkpoint_gradients()
        self.decoder.written_out = False  # layers gather their weights when they are called as modules
        mesh = init_device_mesh(self.device.type, (world.size,))
        blocks = [block for part in self.model.modules() if isinstance(part, torch.nn.ModuleList) for block in part]
        for module in (*blocks, self.model):
            part = fully_shard(module, mesh=mesh)
            part.set_gradient_divide_factor(1.0)  # each process holds its share of a sum, not of a mean
            part.set_force_sum_reduction_for_comms(True)
        # The rest of the weights is gathered around whatever is called through the model, as if it were its forward.
        self.model.through = _call
        register_fsdp_forward_method(self.model, "through")

    def _pass(self, rows: Sequence[Row], temperature: float, entropy: bool, distribution: bool) -> Scores:
        lengths: list[int] = []

        def work() -> tuple[Tensor | None, ...]:  # hooks are set on the tensors that it returns, which must be no views
            found = super(ShardedPolicy, self)._pass(rows, temperature, entropy, distribution)
            lengths[:] = found.lengths
            return found.logprobs.clone(), found.entropy, found.log_distribution

        logprobs, spread, log_distribution = self.model.through(work)
        return Scores(logprobs, lengths, spread, log_distribution)


def _call(work: Any) -> Any:
    return work()


def learner_of(policy: LocalPolicy, world: World) -> LocalPolicy:
    """What an optimizer trains in the policy's place: the policy itself unless the world shares its weights out.

    Raises HarnessError for a policy with adapters, whose training state is small: it is not shared out.
    """
    if world.sharded and policy.adapters:
        raise HarnessError("train.lora trains little and is not shared out over processes (FSDP): use --multi_gpu")
    return ShardedPolicy(policy, world) if world.sharded else policy


@torch.no_grad()
def take_back(policy: LocalPolicy, learner: LocalPolicy) -> None:
    """Give the policy what its learner has learned; every process has to."""
    if learner is not policy:
        for mine, theirs in zip(policy.model.parameters(), learner.model.parameters(), strict=True):
            mine.copy_(whole(theirs))


def whole(value: Any) -> Any:
    """A tensor in one piece; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def clip_gradients(parameters: Sequence[Tensor], limit: float) -> Tensor:
    """Scale gradients so that their norm over all parameters is at most ``limit``; returns the norm before."""
    norm: Tensor = whole(torch.nn.utils.clip_grad_norm_(parameters, limit))
    return norm


def whole_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state as if its parameters were in one piece."""
    state = optimizer.state_dict()
    entries = state["state"].items()
    return {**state, "state": {i: {name: whole(v) for name, v in entry.items()} for i, entry in entries}}


def load_whole_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Restore what :func:`whole_state` returned, in any number of processes."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def split(parameter: Tensor, value: Any) -> Any:
        if not (isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == parameter.shape):
            return value
        return distribute_tensor(value, parameter.device_mesh, parameter.placements)

    entries = state["state"].items()
    parts = {i: {name: split(parameters[i], v) for name, v in entry.items()} for i, entry in entries}
    optimizer.load_state_dict({**state, "state": parts})
