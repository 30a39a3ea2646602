"""Whether two methods differ: tests and intervals for a difference on common tasks, in plain numpy.

Two questions are kept apart. *Do these policies differ?* is answered by the tasks alone (:func:`sign_flip_p`).
*Does one method beat the other?* is about training again, and a method's success moves from seed to seed. How far is
known from a handful of seeds only, so the test (:func:`paired`) is a t-test with few degrees of freedom. In simulations
of equal methods whose seeds lie 3, 6 or 10 points apart (128 tasks, 2 to 5 seeds) the test over tasks called them
different in 8-10, 22-27 and 44-46 % of cases, a bootstrap interval over seeds and tasks missed 0 in up to 2, 6 and
15 %, the t-test in up to 2, 4 and 4 %.

The error of a difference has two parts, seeds and tasks, as in studies where readers and cases are both samples:

    error^2 = sum over the trained methods of max(v, pooled) / S + max(w - sum of r / S, 0)

v is the variance of one seed's mean, never below r, what is left of it if seeds are alike (the residual of seeds x
tasks); ``pooled`` is the mean of v over the trained methods of the setting: no method is taken to vary less between
seeds than they do on average. w is the variance of the mean task difference; it holds r too, which must not count
twice. Degrees of freedom are Satterthwaite's. With 2 to 6 methods, 2 to 5 seeds and 0 to 8 points between seeds the
interval missed a true zero in at most 5 % of cases (6 % where one of six methods varies by 8 points and all others by
none), and a table in which nothing differs had a finding after Holm's correction in at most 5 %.

Shapes: S seeds, T tasks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import NormalDist

import numpy as np

from harness.reporting.statistics import LEVEL, Estimate, Floats, Outcomes, micro, ratio, wilson

POWER = 0.8
ALPHA = 1 - LEVEL


@dataclass(frozen=True)
class SeedVariance:
    """Variance of one seed's mean success, with the degrees of freedom that it was estimated with (0: unknown)."""

    value: float
    freedom: int


@dataclass(frozen=True)
class Paired:
    """Ours minus theirs on the tasks both played.

    Attributes:
        difference: Difference of the micro averages with its 95 % interval, over seeds and tasks where ``seeds``,
            else over tasks only.
        p: Two-sided p that the methods are equal, training again included; NaN where the seeds do not allow a test.
        p_policies: Two-sided p that the policies at hand are equal: exact sign-flip test over tasks.
        detectable: Smallest true difference that a comparison of this size finds in 80 % of repetitions; NaN where no
            task differs from another.
        tasks: Tasks compared; with none all numbers are NaN.
        seeds: Whether the error includes training again: two or more seeds of each trained method.
    """

    difference: Estimate
    p: float
    p_policies: float
    detectable: float
    tasks: int
    seeds: bool


def paired(ours: Outcomes, theirs: Outcomes, pooled: SeedVariance, trained: tuple[bool, bool] = (True, True)) -> Paired:
    """Compare two methods task by task.

    Args:
        pooled: Of all trained methods of the setting (:func:`pooled_seed_variance`).
        trained: Whether ours and theirs were trained. The weights of an untrained policy are the same for every seed,
            so its seeds are more episodes, not other policies.

    Raises ValueError if the panels differ.
    """
    if ours.kinds != theirs.kinds:
        raise ValueError("only outcomes on one panel can be paired")
    common = (ours.count.sum(0) > 0) & (theirs.count.sum(0) > 0)
    if not common.any():
        return Paired(Estimate(math.nan, math.nan, math.nan), math.nan, math.nan, math.nan, 0, False)
    ours, theirs = ours.where(common), theirs.where(common)
    value = micro(ours) - micro(theirs)
    by_task = (ours.per_task - theirs.per_task)[common]
    w, freedom_w = _task_variance(by_task, np.array(ours.kinds)[common])
    arms = [outcomes for outcomes, learned in zip((ours, theirs), trained, strict=True) if learned]
    covered = all(len(arm.total) > 1 for arm in arms) and (not arms or pooled.freedom > 0)
    v = r = 0.0
    if covered:
        v = sum(max(seed_variance(arm), pooled.value) / len(arm.total) for arm in arms)
        r = sum(residual_variance(arm) / len(arm.total) for arm in arms)
    rest = max(w - r, 0.0)
    error = math.sqrt(v + rest)
    freedom = (v + rest) ** 2 / (v**2 / max(pooled.freedom, 1) + rest**2 / freedom_w) if error else math.inf
    p_policies = sign_flip_p(by_task)
    if error:
        p = student_p(value / error, freedom)
        margin = student_quantile((1 + LEVEL) / 2, freedom) * error
    else:  # no task differs from another: Wilson's bound on the share of tasks that would
        p, margin = p_policies, wilson(0, int(common.sum())).high
    return Paired(
        difference=Estimate(value, max(value - margin, -1.0), min(value + margin, 1.0)),
        p=p if covered else math.nan,
        p_policies=p_policies,
        detectable=detectable_difference(error, freedom) if error else math.nan,
        tasks=int(common.sum()),
        seeds=covered,
    )


# ---------------------------------------------------------------------------------------------- variances


def residual_variance(outcomes: Outcomes) -> float:
    """Variance of one seed's mean that single episodes alone explain: residual mean square of seeds x tasks / T."""
    cells = ratio(outcomes.total, outcomes.count)
    played = np.isfinite(cells)
    tasks = outcomes.played
    freedom = int(played.sum()) - len(cells) - tasks + 1
    if freedom < 1:
        return 0.0
    rest = cells - outcomes.per_seed[:, None] - outcomes.per_task[None, :] + micro(outcomes)
    return float((rest[played] ** 2).sum()) / freedom / tasks


def seed_variance(outcomes: Outcomes) -> float:
    """Variance of one seed's mean around the method's, at least :func:`residual_variance`; S >= 2."""
    return max(float(outcomes.per_seed.var(ddof=1)), residual_variance(outcomes))


def pooled_seed_variance(trained: Sequence[Outcomes]) -> SeedVariance:
    """Mean of :func:`seed_variance` over trained methods, weighted by S - 1; those with one seed say nothing."""
    known = [(len(outcomes.total) - 1, seed_variance(outcomes)) for outcomes in trained if len(outcomes.total) > 1]
    freedom = sum(weight for weight, _ in known)
    value = sum(weight * variance for weight, variance in known) / freedom if freedom else math.nan
    return SeedVariance(value, freedom)


def _task_variance(by_task: Floats, kinds: np.ndarray) -> tuple[float, float]:
    """Variance of the mean task difference, tasks drawn within their kind, and its degrees of freedom."""
    _, kind = np.unique(kinds, return_inverse=True)
    size = np.bincount(kind)
    within = by_task - (np.bincount(kind, weights=by_task) / size)[kind]
    freedom = len(by_task) - len(size)
    if freedom < 1:  # every kind has a single task: they stand for each other
        within, freedom = by_task - by_task.mean(), max(len(by_task) - 1, 1)
    return float((within**2).sum()) / freedom / len(by_task), float(freedom)


# -------------------------------------------------------------------------------------------------- tests


def sign_flip_p(differences: Floats) -> float:
    """Two-sided p of the exact permutation test that flips the sign of each task's difference.

    With one episode per task and method this is McNemar's exact test. Differences are means of a few binary outcomes,
    hence multiples of a small fraction: the distribution of the sum over all 2^T flips is computed by convolution.
    Differences without a common denominator up to 5040 are rounded to multiples of 1/5040.
    """
    fractions = [Fraction(float(d)).limit_denominator(5040) for d in differences if d != 0]
    scale = min(math.lcm(*(f.denominator for f in fractions)), 5040)
    steps = [abs(round(f * scale)) for f in fractions]
    observed = abs(sum(round(f * scale) for f in fractions))
    chance = np.ones(1)  # chance[k] = P(sum of the flipped differences so far = (2 k - their total) / scale)
    for step in steps:
        longer = np.zeros(len(chance) + step)
        longer[: len(chance)] = chance / 2
        longer[step:] += chance / 2
        chance = longer
    sums = np.abs(2 * np.arange(len(chance)) - sum(steps))
    return float(min(1.0, chance[sums >= observed].sum()))


def mcnemar_counts(ours: Outcomes, theirs: Outcomes) -> tuple[float, float, float, float]:
    """Tasks solved by (only ours, only theirs, both, neither) on the tasks that both played.

    With several episodes of a task these are expected counts, for one random episode of each method.
    """
    a, b = ours.per_task, theirs.per_task
    common = np.isfinite(a) & np.isfinite(b)
    a, b = a[common], b[common]
    shares = (a * (1 - b), b * (1 - a), a * b, (1 - a) * (1 - b))
    only_ours, only_theirs, both, neither = (float(share.sum()) for share in shares)
    return only_ours, only_theirs, both, neither


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment: reject where the result is below the level, whatever the dependence.

    NaN stands for a test that was not made: it stays NaN and does not count.
    """
    made = [index for index in np.argsort(p_values, kind="stable") if not math.isnan(p_values[index])]
    adjusted, running = [math.nan] * len(p_values), 0.0
    for rank, index in enumerate(made):
        running = max(running, min(1.0, (len(made) - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted


def detectable_difference(error: float, freedom: float = math.inf) -> float:
    """Smallest true difference found with 80 % power by a two-sided t-test at 5 % whose standard error is given."""
    return (student_quantile(1 - ALPHA / 2, freedom) + student_quantile(POWER, freedom)) * error


# ------------------------------------------------------------------------------------- Student's t distribution


def student_p(t: float, freedom: float) -> float:
    """P(|T| >= |t|) of Student's t distribution; infinite freedom gives the normal distribution."""
    if not math.isfinite(t):
        return 0.0 if math.isinf(t) else math.nan
    if freedom > 1e6:
        return math.erfc(abs(t) / math.sqrt(2))
    return incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


def student_quantile(level: float, freedom: float) -> float:
    """The t with P(T <= t) = level, for a level of at least 1/2 and at least one degree of freedom.

    Newton's method from the normal quantile: the distribution function is concave there, so it never overshoots.
    """
    t = NormalDist().inv_cdf(level)
    if freedom > 1e6:
        return t
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2
    for _ in range(100):
        density = math.exp(log_scale - (freedom + 1) / 2 * math.log1p(t * t / freedom))
        step = (level - 1 + student_p(t, freedom) / 2) / density
        t += step
        if abs(step) < 1e-12 * t:
            break
    return t


def incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function I_x(a, b) by its continued fraction (modified Lentz)."""
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly, its mirror image converges fast
        return 1 - incomplete_beta(b, a, 1 - x)
    if x <= 0:
        return 0.0
    tiny = 1e-300
    c, d, value = 1.0, 0.0, 1.0
    for n in range(1000):
        m = n // 2
        if n == 0:
            term = 1.0
        elif n % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1 / ((1 + term * d) or tiny)
        c = (1 + term / c) or tiny
        value *= c * d
        if n and abs(1 - c * d) < 1e-15:
            break
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) * (value - 1) / a
