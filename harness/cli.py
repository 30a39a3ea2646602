"""The ``harness`` command. Heavy libraries are imported by the sub-command that needs them."""

from __future__ import annotations

import argparse
import errno
import inspect
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Read by OpenMP when torch loads: idle threads sleep, and cells that run side by side do not fight for cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from harness import __version__, epilogs
from harness.contracts import HarnessError
from harness.inert import one_line
from harness.perf import PARTS, USUAL
from harness.processes import Terminated, terminable
from harness.registry import COMMANDS, load, registered
from harness.terminal import Terminal


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        top = parser()
        options, rest = top.parse_known_args(arguments)
        # argparse closes a list of positional arguments at the first option; overrides may also follow one.
        if rest and (not hasattr(options, "overrides") or any(argument.startswith("-") for argument in rest)):
            top.error(f"unrecognized arguments: {' '.join(rest)}")
        if rest:
            options.overrides += rest
        with terminable():
            return int(options.run(options))
    except HarnessError as error:
        print(f"harness: {one_line(str(error))}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        print(f"harness: {error.strerror}: {one_line(str(error.filename))[:60]}...", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        print("harness: interrupted; the same command continues where this one stopped", file=sys.stderr)
        return 143 if isinstance(error, Terminated) else 130


def parser() -> argparse.ArgumentParser:
    """The argument parser with all sub-commands."""
    top = argparse.ArgumentParser(
        prog="harness",
        description="Fair, repeatable benchmarking of LLM/VLM agents trained with reinforcement learning.",
        epilog=epilogs.TOP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"harness {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run: Any, text: str, epilog: str = "") -> argparse.ArgumentParser:
        made = commands.add_parser(
            name, help=text, description=text, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        made.set_defaults(run=run)
        return made

    listing = command("list", _list, "Show what is registered.")
    listing.add_argument("what", choices=["envs", "methods", "recipes", "panels", "published"])
    listing.add_argument("env", nargs="?", help="panels: environment whose panels are built, counted and hashed")
    _env_options(listing)

    check = command("check", _check, "Test an environment against the contract.", epilogs.CHECK)
    check.add_argument("env", help="registered id or package.module:Class")
    check.add_argument("--tasks", type=_count, default=32, metavar="N", help="evaluation tasks to play (default 32)")
    _env_options(check)

    run = command("run", _run, "Run a recipe: a grid of environments, methods and seeds.", epilogs.RUN)
    run.add_argument("recipe", help="name (harness list recipes) or path of a YAML file")
    run.add_argument("overrides", nargs="*", metavar="key=value", help="settings that differ from the recipe's")
    run.add_argument("--out", type=Path, metavar="DIR", help="where cells and report go (default results/RECIPE)")
    run.add_argument(
        "--jobs",
        type=_count,
        metavar="N",
        help="cells run at once (default: processor cores, or what fits into the cluster)",
    )
    run.add_argument(
        "--cluster",
        choices=["ray"],
        help="run cells on the Ray cluster that RAY_ADDRESS names, or on a Ray started on this machine",
    )
    _call_options(run, "endpoints that annotate (MODEL@BASE_URL)")
    run.add_argument("--dry-run", action="store_true", help="check what is here, print cells and what they take")

    evaluate = command("eval", _eval, "Play a pinned panel with one policy and print its scores.", epilogs.EVAL)
    evaluate.add_argument(
        "--policy",
        required=True,
        metavar="SPEC",
        help="random, oracle, tiny, tiny-teacher, a model directory, a hub id, a cell's policy/ or checkpoint, "
        "or api:MODEL@BASE_URL of an OpenAI-compatible endpoint",
    )
    evaluate.add_argument("--env", required=True, metavar="ENV", help="registered id (harness list envs)")
    _env_options(evaluate)
    evaluate.add_argument("--panel", default="eval", metavar="NAME", help="which panel (default eval)")
    evaluate.add_argument("--panel-size", type=_count, metavar="N", help="its first N tasks (default all)")
    evaluate.add_argument("--episodes-per-task", type=_count, default=1, metavar="N", help="attempts (default 1)")
    evaluate.add_argument("--temperature", type=float, default=0.4, metavar="T", help="0 is greedy (default 0.4)")
    evaluate.add_argument("--seed", type=_seed, default=0, metavar="S", help="seed of all sampling (default 0)")
    evaluate.add_argument("--max-steps", type=_count, metavar="N", help="step limit (default: the environment's)")
    evaluate.add_argument(
        "--history", type=int, metavar="K", help="past turns in a prompt (default: the environment's)"
    )
    evaluate.add_argument("--max-response-tokens", type=_count, default=512, metavar="N", help="default 512")
    evaluate.add_argument(
        "--precision", choices=("float32", "bfloat16"), default="float32", help="of a model run here (default float32)"
    )
    evaluate.add_argument("--workers", type=_count, default=1, metavar="N", help="environment processes (default 1)")
    evaluate.add_argument("--batch", type=_count, default=128, metavar="N", help="episodes at once (default 128)")
    evaluate.add_argument("--out", type=Path, default=Path("results/eval"), metavar="DIR", help="default results/eval")

    _call_options(evaluate, "endpoints (api:MODEL@BASE_URL)")
    _price_options(evaluate)

    report = command("report", _report, "Write tables, figures and report.html of a run's finished cells.")
    report.add_argument("directory", type=Path, metavar="DIR", help="what `harness run --out` wrote")
    report.add_argument(
        "--with-published", action="store_true", help="put the papers' numbers beside the measured ones"
    )
    report.add_argument("--published", type=Path, metavar="DIR", help="the same, with the numbers of another directory")
    report.add_argument(
        "--budget",
        action="append",
        metavar="NAME",
        help="compare at this budget, repeatable: updates, sampled_tokens, all_tokens, any column of the ledger "
        "(default: episodes, sampled_tokens, cpu_seconds)",
    )
    report.add_argument(
        "--threshold", type=_percent, metavar="PERCENT", help="success whose budget is told (default: grpo's final one)"
    )
    _price_options(report)

    perf = command(
        "perf", _perf, "Measure speed and memory against straightforward references, as ratios.", epilogs.PERF
    )
    perf.add_argument("part", nargs="?", choices=list(PARTS), help=f"default: {', '.join(USUAL)}")
    perf.add_argument("--policy", default="tiny", metavar="SPEC", help="tiny or a model directory (default tiny)")
    perf.add_argument("--episodes", type=_count, default=128, metavar="N", help="episodes at once (default 128)")

    build = command("build-policy", _build_policy, "Rebuild an embedded policy from scripted demonstrations.")
    build.add_argument("name", choices=["able", "tiny", "tiny-teacher"])
    build.add_argument(
        "--start", type=Path, metavar="DIR", help="an `able` policy built before (default: build it first)"
    )
    build.add_argument("--out", type=Path, metavar="DIR", help="where to save it (default: inside the package)")

    play = command("play", _play, "Play a task yourself and see what a policy sees.", epilogs.PLAY)
    play.add_argument("env", metavar="ENV", help="registered id or package.module:Class")
    play.add_argument("--panel", default="eval", metavar="NAME", help="which panel (default eval)")
    play.add_argument("--task", type=_count, default=1, metavar="N", help="the panel's N-th task (default 1)")
    play.add_argument("--style", choices=["paper", "compact"], help="show the prompt of this style")
    play.add_argument(
        "--images", choices=["half", "sixel", "files"], help="default: half blocks in a colour terminal, else files"
    )
    _env_options(play)

    new = command(
        "new-env", _new_env, "Write a package with an environment of your own to start from.", epilogs.NEW_ENV
    )
    new.add_argument("name", help="e.g. TrafficLights, registered as TrafficLights-v1")
    new.add_argument("--out", type=Path, metavar="DIR", help="directory to create (default: ./traffic-lights)")
    new.add_argument("--vision", action="store_true", help="observations are pictures")

    for name, point in registered(COMMANDS).items():
        arguments = load(point)
        arguments(command(name, None, (inspect.getdoc(arguments) or "").partition("\n")[0]))
    return top


def _env_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--env-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="constructor option of the environment, repeatable; VALUE is YAML",
    )


def _call_options(command: argparse.ArgumentParser, title: str) -> None:
    endpoint = command.add_argument_group(title)
    endpoint.add_argument("--concurrency", type=_count, default=16, metavar="N", help="requests at once (default 16)")
    endpoint.add_argument(
        "--timeout", type=_positive, default=300.0, metavar="S", help="seconds that a try may take (default 300)"
    )


def _price_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--price-in", type=_positive, metavar="P", help="price of a million prompt tokens")
    command.add_argument("--price-out", type=_positive, metavar="P", help="price of a million answer tokens")


def _prices(options: argparse.Namespace) -> tuple[float, float] | None:
    prices = (options.price_in, options.price_out)
    if prices.count(None) == 1:
        raise HarnessError("--price-in and --price-out belong together")
    return None if None in prices else prices


def _options(pairs: Sequence[str]) -> dict[str, Any]:
    from harness.validation import read_yaml

    options = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise HarnessError(f"--env-option {pair!r} is not of the form name=value")
        options[name] = read_yaml(text, f"--env-option {pair!r}: {text!r} is not a YAML value")
    return options


def _count(text: str) -> int:
    value = _number(text)
    if not (value >= 1 and value.is_integer()):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(value)


def _seed(text: str) -> int:
    if not (text.isdecimal() and int(text) < 2**63):
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 2^63 - 1, not {text!r}")
    return int(text)


def _positive(text: str) -> float:
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return value


def _percent(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 100:
        raise argparse.ArgumentTypeError(f"must be a number above 0 and at most 100, not {text!r}")
    return value / 100


def _number(text: str) -> float:
    """What a word says as a number; NaN, which lies in no range, where it is none."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


# ------------------------------------------------------------------------------------------------ commands


def _list(options: argparse.Namespace) -> int:
    from harness import listing
    from harness.reporting import published

    if options.what != "panels" and (options.env or options.env_option):
        raise HarnessError(f"list {options.what} takes no environment; list panels does")
    if options.what == "panels":
        table = listing.panels(options.env, _options(options.env_option))
    elif options.what == "published":
        table = published.listing(published.load(published.default_directory()))
    else:
        table = {"envs": listing.envs, "methods": listing.methods, "recipes": listing.recipes}[options.what]()
    Terminal().print(table)
    return 0


def _check(options: argparse.Namespace) -> int:
    from harness.check import check, results_table

    results = check(options.env, _options(options.env_option), options.tasks)
    Terminal().print(results_table(options.env, results))
    return 0 if all(result.passed for result in results) else 1


def _play(options: argparse.Namespace) -> int:
    from harness import play

    chosen = _options(options.env_option)
    return play.main(
        options.env, chosen, options.panel, options.task, options.style, options.images, Terminal(highlight=False)
    )


def _new_env(options: argparse.Namespace) -> int:
    from harness.scaffold import new_env

    names, directory = new_env(options.name, options.out, options.vision)
    print(f"{names.env_id}: {directory}\n")
    print(f"  cd {directory}\n  python -m pip install --editable .\n  harness check {names.env_id}\n")
    print("README.md shows how to play, train and make it your own.")
    return 0


def _run(options: argparse.Namespace) -> int:
    from harness.policy.api import Calls
    from harness.recipes import load_recipe
    from harness.runner import require_one_way, run

    recipe = load_recipe(options.recipe, options.overrides)
    directory = options.out or Path("results") / recipe.name
    require_one_way(recipe, options.jobs, options.cluster is not None)
    if options.dry_run:
        from harness import dry_run

        dry_run.show(recipe, directory, Terminal())
        return 0
    calls = Calls(options.concurrency, options.timeout)
    return run(recipe, directory, options.jobs, Terminal(), calls, cluster=options.cluster is not None)


def _eval(options: argparse.Namespace) -> int:
    from harness.config import EnvConfig, EvalConfig
    from harness.evaluate import evaluate, show
    from harness.policy.api import PREFIX, Calls
    from harness.validation import validate

    prices = _prices(options)
    if prices and not options.policy.startswith(PREFIX):
        raise HarnessError(f"--price-in and --price-out are prices of an endpoint, and {options.policy!r} is none")

    settings = {
        "panel": options.panel,
        "panel_size": options.panel_size,
        "episodes_per_task": options.episodes_per_task,
        "temperature": options.temperature,
        "batch": options.batch,
    }
    env = {
        "history": options.history,
        "max_steps": options.max_steps,
        "max_response_tokens": options.max_response_tokens,
    }
    place = evaluate(
        validate(EnvConfig, {"id": options.env, "options": _options(options.env_option), **env}, "harness eval"),
        options.policy,
        options.precision,
        options.seed,
        validate(EvalConfig, settings, "harness eval"),
        options.out,
        options.workers,
        Calls(options.concurrency, options.timeout),
        Terminal(stderr=True),
    )
    show(place, Terminal(), prices)
    return 0


def _report(options: argparse.Namespace) -> int:
    from harness.reporting.published import default_directory
    from harness.reporting.report import BUDGET_COLUMNS, comparison_text, write_report

    published = options.published or (default_directory() if options.with_published else None)
    budgets = options.budget or BUDGET_COLUMNS
    page = write_report(options.directory, published, budgets, options.threshold, _prices(options))
    console = Terminal()
    console.print(comparison_text(options.directory))
    console.print(f"report: {page}", soft_wrap=True)
    return 0


def _perf(options: argparse.Namespace) -> int:
    from harness.perf import measure

    return measure.main(options.part, options.policy, options.episodes, Terminal())


def _build_policy(options: argparse.Namespace) -> int:
    from harness.policy import build

    return build.main(options.name, options.out, options.start)


if __name__ == "__main__":
    sys.exit(main())
