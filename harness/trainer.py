"""One update of a policy from step rows. The trainer reads per-row streams; it never asks which method made them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal

import torch

from harness import objective
from harness.cards import Ledger
from harness.config import EngineConfig, TrainConfig
from harness.contracts import HarnessError, Prompt
from harness.credit import Credit, beta_of, distillation, gated, pull
from harness.methods import Method, Reweighting, full_vocabulary
from harness.policy.local import LocalPolicy
from harness.policy.score import Scores
from harness.policy.sharded import clip_gradients, learner_of, load_whole_state, take_back, whole_state
from harness.rows import (
    Row,
    Sample,
    Streams,
    Update,
    choose,
    forward_flops,
    mini_batches,
    rescored,
    score_rows,
    training_flops,
)
from harness.skipping import Skips, likely_cause
from harness.world import World


def _record(totals: dict[str, float], statistics: objective.Stats, weights: torch.Tensor) -> None:
    for name, value in statistics.items():
        totals[name] += objective.average(value, weights).item()


class Trainer:
    """Owns the optimizer. ``policy`` is trained in place.

    Args:
        reference: Frozen policy of the KL term; required where ``config.kl > 0``. It is also the teacher and the
            analyzer of methods that use the start's weights.
        teacher: External teacher; required where the method's teacher has ``weights="external"``.
        world: The processes that share the work; all of them make the same calls.
    """

    def __init__(
        self,
        policy: LocalPolicy,
        method: Method,
        config: TrainConfig,
        *,
        seed: int,
        reference: LocalPolicy | None = None,
        teacher: LocalPolicy | None = None,
        world: World | None = None,
    ) -> None:
        self.policy, self.method, self.config, self.seed = policy, method, config, seed
        self.reference, self.teacher, self.world = reference, teacher, world or World()
        if self.world.sharded and method.teacher and method.teacher.weights == "current":
            raise HarnessError(
                f"{method.name}: teacher.weights current is scored inside the loss, which weights shared out over "
                "processes (FSDP) cannot do; launch without --use_fsdp, or use update_start"
            )
        if config.gradient_checkpointing:
            policy.checkpoint_gradients()
        self.learner = learner_of(policy, self.world)
        self.optimizer = torch.optim.AdamW(
            [p for p in self.learner.model.parameters() if p.requires_grad],
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.steps = 0
        self.skips = Skips(config.max_skipped, config.exploding)

    # ------------------------------------------------------------------------------------------ one update

    def update(self, rows: Sequence[Row], number: int, ledger: Ledger, rehearsed: Sequence[Sample] = ()) -> Update:
        """Optimise on the rows of update ``number`` (1-based) and on ``rehearsed`` samples; charge ``ledger``."""
        places = choose(rows, self.config.max_rows, (self.seed, number, 1))
        rows = [rows[place] for place in places]
        if not rows:
            return Update({"rows": 0.0}, {})
        self._set_learning_rate(number)
        reference, teacher = self._score_reference(rows, ledger), self._score_teacher(rows, ledger)
        watched = self._score_watched(rows, teacher)
        totals: dict[str, float] = defaultdict(float)
        credit: dict[int, Credit] = {}
        batches = mini_batches(rows, self.config.mini_batches, (self.seed, number, 2))
        before = self.steps
        for turn, batch in enumerate(batches):
            chosen = [rows[i] for i in batch]
            known = [{j: stream[i] for j, i in enumerate(batch) if i in stream} for stream in (reference, teacher)]
            streams = self._streams(chosen, number, *known)
            scored = {j: watched[i] for j, i in enumerate(batch) if i in watched}
            told = {places[batch[j]]: found for j, found in self._credit(chosen, streams, scored).items()}
            if self._optimise(number, chosen, rehearsed[turn :: len(batches)], streams, totals, ledger):
                credit |= told
        take_back(self.policy, self.learner)
        done = self.steps - before
        means = {name: value / done for name, value in totals.items()}
        if done < len(batches):
            means["skipped_steps"] = float(len(batches) - done)
        return Update({"rows": float(len(rows)), **means}, credit)

    def rescore(self, rows: Sequence[Row], engine: EngineConfig, ledger: Ledger) -> tuple[list[Row], dict[str, float]]:
        """Rows that an engine sampled as :func:`harness.rows.rescored` gives them back; charges the scoring."""
        chosen = [i for i, row in enumerate(rows) if row.active and row.response]
        pairs = [(rows[i].prompt, rows[i].response) for i in chosen]
        self._charge(self.policy, pairs, ledger)
        return rescored(rows, dict(zip(chosen, self._score(self.policy, pairs), strict=True)), engine)

    def _set_learning_rate(self, number: int) -> None:
        rise = self.config.warmup * self.config.updates
        scale = min(1.0, number / rise) if rise else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * scale

    # ------------------------------------------------------------------------------------------ scoring

    def _score_reference(self, rows: Sequence[Row], ledger: Ledger) -> dict[int, torch.Tensor]:
        """log pi_ref for the KL term."""
        if self.config.kl == 0:
            return {}
        if self.steps == 0:  # the reference is the policy itself: its sampling log-probs are the answer
            return {i: self._tensor(row.logp_old) for i, row in enumerate(rows)}
        pairs = [(row.prompt, row.response) for row in rows]
        self._charge(self.start(), pairs, ledger)
        return dict(enumerate(self._score(self.start(), pairs)))

    def _score_teacher(self, rows: Sequence[Row], ledger: Ledger) -> dict[int, torch.Tensor]:
        """log pi_T of the sampled tokens, where the teacher does not change during the update."""
        spec, signal = self.method.teacher, self.method.signal
        if spec is None or full_vocabulary(signal) or spec.weights == "current":
            return {}
        scorer = self._scorer(spec.weights)
        known: dict[int, torch.Tensor] = {}
        if scorer is self.policy:  # same weights and same prompt: the sampling log-probs are the answer
            known = {i: self._tensor(r.logp_old) for i, r in enumerate(rows) if r.teacher_prompt == r.prompt}
        todo = {
            i: (row.teacher_prompt, row.response)
            for i, row in enumerate(rows)
            if row.teacher_prompt is not None and i not in known
        }
        self._charge(scorer, list(todo.values()), ledger)
        ledger.rescored_tokens += sum(len(response) for _, response in todo.values())
        scored = self._score(scorer, list(todo.values()))
        return known | dict(zip(todo, scored, strict=True))

    def _score_watched(self, rows: Sequence[Row], teacher: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """log pi_T of the watched rows at the update's start, for their credit alone, hence not charged."""
        spec = self.method.teacher
        watched = {i: row.teacher_prompt for i, row in enumerate(rows) if row.watched and row.teacher_prompt}
        if spec is None or not watched:
            return {}
        todo = {i: (prompt, rows[i].response) for i, prompt in watched.items() if i not in teacher}
        scored = self._score(self._scorer(spec.weights), list(todo.values()))
        return {i: teacher[i] for i in watched if i in teacher} | dict(zip(todo, scored, strict=True))

    def _score(self, policy: LocalPolicy, pairs: Sequence[Sample]) -> list[torch.Tensor]:
        """Log-probs of each response under each prompt; every process scores its share."""
        mine = score_rows(policy, self.world.mine(pairs), self.config.temperature)
        if self.world.size == 1:
            return mine
        return [scores.to(self.policy.device) for scores in self.world.collect([scores.cpu() for scores in mine])]

    def _charge(self, policy: LocalPolicy, pairs: Sequence[tuple[Prompt, Sequence[int]]], ledger: Ledger) -> None:
        tokens = sum(len(response) for _, response in pairs)
        ledger.flops += forward_flops(policy, (prompt for prompt, _ in pairs), tokens)

    def _scorer(self, weights: str) -> LocalPolicy:
        if weights == "external":
            return self._teacher()
        return self.start() if weights == "start" else self.policy

    def start(self) -> LocalPolicy:
        """The frozen policy at the start of stage 2: reference, and analyzer or teacher where the method says so."""
        if self.reference is None:
            raise ValueError("this configuration needs the start policy as reference")
        return self.reference

    def _teacher(self) -> LocalPolicy:
        if self.teacher is None:
            raise ValueError("this method needs an external teacher")
        return self.teacher

    def _tensor(self, values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, device=self.policy.device)

    # ------------------------------------------------------------------------------------------ optimising

    def _streams(
        self, rows: Sequence[Row], number: int, reference: dict[int, torch.Tensor], teacher: dict[int, torch.Tensor]
    ) -> Streams:
        """Advantages and weights of a mini-batch's tokens, beside the log-probs that are already known."""
        lengths = [len(row.response) for row in rows]
        repeats = self._tensor(lengths)
        episodes = self._tensor([row.episode for row in rows]).repeat_interleave(repeats)

        def weights(active: Sequence[bool], normalise: Literal["token", "episode"]) -> tuple[torch.Tensor, ...]:
            mask = self._tensor(active).repeat_interleave(repeats)
            return torch.split(objective.token_weights(mask, normalise, episodes), lengths)

        return Streams(
            advantage=tuple(self._token_advantage(row, teacher.get(i), number) for i, row in enumerate(rows)),
            policy=weights([row.advantage is not None for row in rows], self.config.normalise),
            distill=weights([row.teacher_prompt is not None for row in rows], "token"),
            every=weights([True] * len(rows), "token"),
            reference=reference,
            teacher=teacher,
        )

    def _token_advantage(self, row: Row, teacher: torch.Tensor | None, number: int) -> torch.Tensor:
        """A of every token of a row; the row's own, scaled by the teacher's shift where the method says so."""
        signal = self.method.signal
        advantage = self._tensor([row.advantage or 0.0] * len(row.response))
        if row.correction is not None:  # a positive factor of A is one of the token's loss, clipped or not
            advantage = advantage * self._tensor(row.correction)
        if not isinstance(signal, Reweighting) or teacher is None:
            return advantage
        share = objective.decayed(signal.coefficient, signal.decay_updates, number)
        old = self._tensor(row.logp_old)
        return objective.reweighted_advantage(advantage, old, teacher, share, signal.clip)

    def _credit(self, rows: Sequence[Row], streams: Streams, scored: dict[int, torch.Tensor]) -> dict[int, Credit]:
        """What the tokens of the watched rows of a mini-batch are told to learn; ``scored`` is their log pi_T."""
        config, signal = self.config, self.method.signal
        weights = torch.cat(streams.policy if any(w.any() for w in streams.policy) else streams.distill)
        mean = weights.sum() / (weights > 0).sum().clamp(min=1)
        beta = beta_of(signal) if signal else None
        found = {}
        for i in (i for i, row in enumerate(rows) if row.watched):
            old = self._tensor(rows[i].logp_old)
            teacher = scored.get(i)
            pulled = pull(
                streams.advantage[i],
                old,
                old if teacher is None else teacher,
                streams.policy[i],
                streams.distill[i],
                torch.where(streams.policy[i] > 0, streams.policy[i], mean),
                signal,
                config.clip,
                config.dual_clip,
            )
            gate = None if teacher is None or beta is None else objective.gate(old, teacher, beta).tolist()
            found[i] = Credit(None if teacher is None else teacher.tolist(), gate, pulled.tolist())
        return found

    def _optimise(
        self,
        number: int,
        rows: Sequence[Row],
        rehearsed: Sequence[Sample],
        streams: Streams,
        totals: dict[str, float],
        ledger: Ledger,
    ) -> bool:
        """One optimizer step: the gradients of all micro-batches add up to the mini-batch's.

        Returns whether it was taken; one whose gradient exploded changes neither weights nor optimizer nor totals.
        """
        pairs = [(row.prompt, row.response) for row in rows]
        self.optimizer.zero_grad(set_to_none=True)
        sums: dict[str, float] = defaultdict(float)
        for part, counts in self.world.deal(self.policy.plan_micro_batches(pairs, self.config.token_budget)):
            loss = self._loss(rows, part, streams, sums if counts else defaultdict(float))
            (loss if counts else 0 * loss).backward()
        self._charge_inner_teacher(rows, pairs, ledger)
        if self.method.rehearsal and rehearsed:
            self._rehearse(rehearsed, self.method.rehearsal.coefficient, sums, ledger)
        parameters = list(self.learner.model.parameters())
        self.world.add_gradients(parameters)
        norm = clip_gradients(parameters, self.config.grad_clip)
        self._charge_training(pairs, ledger)
        if not self.skips.steps(norm, f"update {number}", lambda: likely_cause(self.optimizer, rows, streams)):
            return False
        self.optimizer.step()
        self.steps += 1
        ledger.optimizer_steps += 1
        for name, value in {**self.world.total(sums), "grad_norm": float(norm)}.items():
            totals[name] += value
        return True

    def _charge_inner_teacher(self, rows: Sequence[Row], pairs: Sequence[Sample], ledger: Ledger) -> None:
        """What it cost to score a teacher inside the loss."""
        spec, signal = self.method.teacher, self.method.signal
        if spec is not None and (full_vocabulary(signal) or spec.weights == "current"):
            read = [(row.teacher_prompt or prompt, answer) for row, (prompt, answer) in zip(rows, pairs, strict=True)]
            self._charge(self._scorer(spec.weights), read, ledger)
            ledger.rescored_tokens += sum(len(row.response) for row in rows if row.teacher_prompt is not None)

    def _rehearse(
        self, samples: Sequence[Sample], coefficient: float, totals: dict[str, float], ledger: Ledger
    ) -> None:
        """Add the gradient of coefficient x the mean negative log-likelihood of the samples' answer tokens."""
        tokens = sum(len(answer) for _, answer in samples)
        for part, counts in self.world.deal(self.policy.plan_micro_batches(samples, self.config.token_budget)):
            loss = counts * -self.learner.score([samples[i] for i in part]).logprobs.sum() / tokens
            totals["loss/rehearsal"] += loss.item()
            (coefficient * loss).backward()
        self._charge_training(samples, ledger)

    def _charge_training(self, pairs: Sequence[Sample], ledger: Ledger) -> None:
        tokens = sum(len(answer) for _, answer in pairs)
        ledger.trained_tokens += tokens
        ledger.flops += training_flops(self.policy, (prompt for prompt, _ in pairs), tokens)

    def _loss(
        self, rows: Sequence[Row], part: Sequence[int], streams: Streams, totals: dict[str, float]
    ) -> torch.Tensor:
        """Loss of one micro-batch, the rows ``part``. All vectors are flat [N] over their response tokens."""
        config, signal = self.config, self.method.signal
        chosen = [rows[i] for i in part]
        scores = self.learner.score(
            [(row.prompt, row.response) for row in chosen],
            temperature=config.temperature,
            entropy=True,
            distribution=full_vocabulary(signal),
        )
        logp = scores.logprobs
        old = self._tensor([value for row in chosen for value in row.logp_old])
        advantage, policy, every = (
            torch.cat([stream[i] for i in part]) for stream in (streams.advantage, streams.policy, streams.every)
        )

        per_token, statistics = objective.policy_gradient(logp, old, advantage, config.clip, config.dual_clip)
        loss = objective.average(per_token, policy)
        _record(totals, statistics, policy)
        entropy = objective.average(scores.require_entropy(), every)
        terms = {"loss/policy": loss, "entropy": entropy}
        if config.entropy:
            loss = loss - config.entropy * entropy
        if config.kl:
            reference = torch.cat([streams.reference[i] for i in part])
            terms["loss/kl"] = objective.average(objective.kl_k3(logp, reference), every)
            loss = loss + config.kl * terms["loss/kl"]
        if signal is not None:
            terms["loss/distill"] = self._distill(rows, part, scores, old, streams, totals)
            loss = loss + signal.coefficient * terms["loss/distill"]
        for name, term in terms.items():
            totals[name] += term.item()
        return loss

    def _distill(
        self,
        rows: Sequence[Row],
        part: Sequence[int],
        scores: Scores,
        old: torch.Tensor,
        streams: Streams,
        totals: dict[str, float],
    ) -> torch.Tensor:
        """The method's signal, summed over the active tokens of the micro-batch."""
        signal, spec = self.method.signal, self.method.teacher
        if signal is None or spec is None:
            raise ValueError("no teacher to distil from")
        weight = torch.cat([streams.distill[i] for i in part])
        pairs = [(rows[i].teacher_prompt or rows[i].prompt, rows[i].response) for i in part]
        if full_vocabulary(signal):
            with torch.no_grad():
                theirs = self._scorer(spec.weights).score(pairs, temperature=self.config.temperature, distribution=True)
            per_token = objective.reverse_kl_full(scores.require_distribution(), theirs.require_distribution())
            gap = theirs.logprobs - scores.logprobs.detach()
            _record(totals, {"skill/gap": gap, "skill/teacher_kl": per_token.detach()}, weight)
            return objective.average(gated(signal, per_token, scores.logprobs, theirs.logprobs), weight)
        if spec.weights == "current":
            teacher = torch.cat(score_rows(self.policy, pairs, self.config.temperature))
        else:
            teacher = torch.cat([streams.teacher.get(i, self._tensor([0.0] * len(rows[i].response))) for i in part])
        per_token, statistics = distillation(signal, scores.logprobs, old, teacher, self.config.clip)
        _record(totals, {f"skill/{name}": value for name, value in statistics.items()}, weight)
        return objective.average(per_token, weight)

    # ------------------------------------------------------------------------------------------ persistence

    def forget_pictures(self) -> None:
        """Drop the picture features that any of the policies remembers."""
        for policy in (self.policy, self.reference, self.teacher):
            if policy is not None:
                policy.forget_pictures()

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold besides the weights."""
        return {
            "optimizer": whole_state(self.optimizer),
            "steps": self.steps,
            "skipped": self.skips.in_a_row,
            "rng": torch.get_rng_state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        load_whole_state(self.optimizer, state["optimizer"])
        self.steps, self.skips.in_a_row = int(state["steps"]), int(state["skipped"])
        torch.set_rng_state(state["rng"])
