"""The command line: ``dflash-conformance`` and ``python -m conformance``.

Imports nothing heavy before a command needs it: ``--help`` and ``clauses`` answer at once.
"""

from __future__ import annotations

import sys
import textwrap
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from conformance.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from conformance.pool import Answer, Job, Pool
    from conformance.sut.source import Tree
    from conformance.waivers import Waiver

_EPILOG = """\b
Exit status:
  0    conforms (waived deviations are listed); gate: preserved, or accepted
  1    a deviation; gate: also a change that nobody has accepted
  2    the request or the environment is wrong
  3    a fault of the suite itself
  125  the tree cannot be tested: no entry point any more, or it needs what
       the harness lacks (git bisect skips it)
"""


@click.group(epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dflash-conformance")
def cli() -> None:
    """Check how an SGLang tree hands DFlash state from one overlapped step to the next."""


class _Given(click.Path):
    """The path of an option. An empty one is refused: it would mean the present folder.

    Args:
        what: what to give instead, for the error.
    """

    def __init__(self, what: str) -> None:
        super().__init__(path_type=Path)
        self._what = what

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See :class:`click.Path`."""
        if value == "" and param is not None:
            raise UserError(f"give {param.opts[0]} {self._what}")
        return super().convert(value, param, ctx)


def _tree_options(command: Any) -> Any:
    """Options shared by run, matrix and replay."""
    for option in reversed(
        (
            click.option(
                "--device",
                type=click.Choice(["cpu", "cuda"]),
                default="cpu",
                show_default=True,
                help="Where the tree's tensors live.",
            ),
            click.option(
                "--imports",
                type=click.Choice(["isolated", "real"]),
                default="isolated",
                show_default=True,
                help="Load only the code under test, or the installed package as it is.",
            ),
            click.option("--offline", is_flag=True, help="Use cached releases only."),
            click.option(
                "--declare",
                type=_Given("a TOML file"),
                help="TOML file with [[field]] tables for attributes the census does not know.",
            ),
            click.option(
                "--map",
                "mapped",
                multiple=True,
                metavar="MODULE=PATH",
                help="Where a fork has a module, below the folder that holds sglang/.",
            ),
        )
    ):
        command = option(command)
    return command


_waivers_option = click.option(
    "--waivers",
    type=_Given("a TOML file"),
    metavar="FILE",
    help="Further waivers, beside the packaged ones.",
)


def _run_options(command: Any) -> Any:
    """Options shared by run and matrix."""
    for option in reversed(
        (
            click.option(
                "--profile",
                type=click.Choice(["quick", "pr", "nightly"]),
                default="quick",
                show_default=True,
                help="Budget: 60 thousand, 520 thousand or 10 million operations per tree.",
            ),
            click.option("--wild", is_flag=True, help="Also try uses no scheduler path issues."),
            click.option(
                "--seed", type=click.IntRange(0), default=0, show_default=True, metavar="N"
            ),
            click.option(
                "--report",
                type=_Given("a folder"),
                metavar="DIR",
                help="Write report.json, summary.md, junit.xml, annotations.txt and traces there.",
            ),
            _waivers_option,
        )
    ):
        command = option(command)
    return command


@cli.command()
@click.option(
    "--sglang",
    metavar="TREE",
    help="A release (0.5.23), a checkout, CHECKOUT@REF, or 'installed'. Default: newest supported.",
)
@_run_options
@_tree_options
def run(sglang: str | None, **options: Any) -> None:
    """Check one tree.

    \b
    Examples:
      dflash-conformance run
      dflash-conformance run --sglang path/to/sglang@my-branch --profile pr --report out
    """
    from conformance.sut.source import NEWEST

    sys.exit(_check([sglang or NEWEST], **options))


@cli.command()
@click.argument("releases", metavar="0.5.14..0.5.23")
@_run_options
@_tree_options
def matrix(releases: str, **options: Any) -> None:
    """Check several releases: a range, or a list with commas.

    \b
    Example:
      dflash-conformance matrix 0.5.14..0.5.23 --report out
    """
    from conformance.sut.source import release_range

    sys.exit(_check(release_range(releases), label=releases, **options))


def _check(
    specs: list[str],
    *,
    profile: str,
    wild: bool,
    seed: int,
    report: Path | None,
    waivers: Path | None,
    label: str | None = None,
    **tree_options: Any,
) -> int:
    from conformance import last_run
    from conformance.report import document, files, terminal
    from conformance.runner import PROFILES, SuiteFault, check_trees

    console = _console()
    trees, options = _trees(specs, **tree_options)
    accepted = _accepted(waivers)
    if report is not None:
        files.open_folder(report)
    budget = PROFILES[profile]
    total = len(trees) * (budget.plain + budget.debug + budget.compiled)
    with _pool(options) as pool, terminal.progress(console, total) as progress:

        def answered(answer: Any) -> None:
            if len(trees) == 1:
                terminal.show_job(console, answer)

        def finished(tree_report: Any) -> None:
            if len(trees) > 1:
                terminal.show_tree(console, document.tree_document(tree_report, wild=wild))

        reports = check_trees(
            trees,
            budget,
            pool,
            seed=seed,
            wild=wild,
            waivers=accepted,
            progress=progress,
            answered=answered,
            finished=finished,
            **options,
        )
    result = document.document(
        reports, label=label or trees[0].label, profile=profile, seed=seed, wild=wild
    )
    written = files.write(report, result) if report is not None else {}
    terminal.show(console, result, written)
    # Traces that end at a deviation do not reach everything; a run that found nothing must.
    unreached = [
        f"{r.tree.label}: {name}"
        for r in reports
        if r.verdict == "conforms"
        for name in r.unreached(wild=wild)
    ]
    if unreached:
        raise SuiteFault(f"never reached: {', '.join(unreached)}")
    counts = {r.tree.label: r.clause_counts(wild=wild) for r in reports if r.refusal is None}
    command = "run" if label is None else "matrix"
    last_run.save(_cache(), last_run.LastRun(command, profile, seed, counts))
    if result["verdict"] == "no entry point":
        return max(r.status for r in reports)
    return 1 if result["verdict"] == "deviates" else 0


@cli.command()
@click.option("--base", metavar="TREE", required=True, help="What there is: a tree, or a ref.")
@click.option("--head", metavar="TREE", required=True, help="What is proposed, likewise.")
@click.option("--repo", metavar="CHECKOUT", help="Checkout in which --base and --head are refs.")
@click.option(
    "--accept",
    type=_Given("a TOML file"),
    metavar="FILE",
    help="TOML file with an [[accept]] record for every change that is meant.",
)
@_run_options
@_tree_options
def gate(**options: Any) -> None:
    """Compare two trees: is behaviour preserved, and if not, where does it change?

    \b
    Examples:
      dflash-conformance gate --repo path/to/sglang --base main --head my-branch --report out
      dflash-conformance gate --base 0.5.14 --head 0.5.15
    """
    sys.exit(_gate(**options))


def _gate(
    *,
    base: str,
    head: str,
    repo: str | None,
    accept: Path | None,
    profile: str,
    wild: bool,
    seed: int,
    report: Path | None,
    waivers: Path | None,
    **tree_options: Any,
) -> int:
    from conformance import acceptance
    from conformance.gate import DEVIATES, compare
    from conformance.report import files, terminal
    from conformance.report import gate as page
    from conformance.runner import PROFILES, SuiteFault

    console = _console()
    specs = [f"{repo}@{ref}" if repo is not None else ref for ref in (base, head)]
    (one, two), options = _trees(specs, **tree_options)
    records = acceptance.load(accept) if accept is not None else []
    covered = _accepted(waivers)
    if report is not None:
        files.open_folder(report)
    budget = PROFILES[profile]
    total = 2 * (budget.plain + budget.debug + budget.compiled)
    with _pool(options) as pool, terminal.progress(console, total) as progress:
        comparison = compare(
            one,
            two,
            budget,
            pool,
            seed=seed,
            wild=wild,
            waivers=covered,
            acceptances=records,
            progress=progress,
            **options,
        )
    # Traces that end at a deviation do not reach everything; a head that has none must.
    unreached = ", ".join(comparison.head.unreached(wild=wild))
    if comparison.verdict == DEVIATES:
        unreached = ""
    if unreached:
        comparison.notes.append(f"a fault of the suite: never reached: {unreached}")
    result = page.document(comparison, profile=profile, seed=seed, wild=wild)
    written = page.write(report, result) if report is not None else {}
    page.show(console, result, written)
    if unreached:
        raise SuiteFault(f"never reached: {unreached}")
    return 0 if comparison.passes else 1


@cli.command()
@click.argument("trace", type=click.Path(path_type=Path), metavar="TRACE.json")
@click.option("--sglang", metavar="TREE", help="Default: newest supported release.")
@click.option("--wild", is_flag=True, help="Also where the tree's scheduler would not issue it.")
@click.option(
    "--emit-test",
    "emit",
    type=_Given("a file"),
    metavar="FILE",
    help="Write the deviation as a unit test that needs only SGLang, for its own CI.",
)
@_waivers_option
@_tree_options
def replay(trace: Path, sglang: str | None, **options: Any) -> None:
    """Replay one trace or kernel case, from a failures/ file or written by hand, on any tree.

    \b
    Example:
      git bisect run dflash-conformance replay failure.json --sglang .
    """
    sys.exit(_replay(trace, sglang, **options))


def _replay(
    path: Path,
    sglang: str | None,
    *,
    wild: bool,
    emit: Path | None,
    waivers: Path | None,
    **tree_options: Any,
) -> int:
    from conformance.emit import target
    from conformance.pool import Job
    from conformance.report import explain
    from conformance.runner import crash_deviation
    from conformance.sut.source import NEWEST
    from conformance.sut.worker import Config
    from conformance.waivers import case_in
    from generators.operations import Trace, TraceError
    from generators.schedules import Schedule, schedule_in

    console = _console()
    trace: Trace | Schedule | None = None
    try:
        text = path.read_text(encoding="utf-8")
        case = case_in(text)
        if case is None:
            trace = schedule_in(text) or Trace.loads(text)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a trace file to replay") from None
    except (TraceError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}") from None
    if trace is None and emit is not None:
        raise UserError(f"--emit-test: {path} holds a kernel case; only traces become tests")
    if emit is not None and isinstance(trace, Schedule):
        raise UserError(f"--emit-test: {path} holds a schedule; only traces become tests")
    if emit is not None and trace is not None and trace.header.kv_tokens:
        raise UserError(f"--emit-test: {path} has a KV pool; only traces without become tests")
    (tree,), options = _trees([sglang or NEWEST], **tree_options)
    config = Config(root=str(tree.root), **options)
    request: dict[str, Any] = {"waivers": [waiver.request() for waiver in _accepted(waivers)]}
    if trace is None:
        request |= {"do": "replay-case", "case": case}
    else:
        config.debug = trace.header.debug
        if isinstance(trace, Trace):
            config.compiled = trace.header.compiled
            wild = wild or any(operation.wild for operation in trace.operations)
        request |= {"do": "replay", "trace": trace.as_json(), "wild": wild}
    job = Job(tree.label, config, request)
    with _pool(options, size=1) as pool:
        answer = _answer(pool, job)
        result = answer.result or {}
        deviation = crash_deviation(answer) if answer.crash else result["deviation"]
        test = None
        if emit is not None:
            if deviation is None:
                raise UserError(f"no test was written: the trace conforms on {tree.label}")
            writing = Job(tree.label, config, {**request, "emit": deviation})
            test = (_answer(pool, writing).result or {})["test"]
    if deviation is None:
        lines = [result["line"]] if trace is None else [trace.header.line(), *trace.lines()]
        console.print(*lines, sep="\n", highlight=False, markup=False, soft_wrap=True)
        console.print(f"[green]conforms[/]: {tree.label}", highlight=False)
        return 0
    headline = f"[bold]{explain.headline(deviation)}[/]  on {tree.label}"
    console.print(headline, highlight=False, soft_wrap=True)
    for line in explain.lines(deviation):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if emit is not None and test is not None:
        target.write(emit, test)
        console.print(f"wrote {emit}", highlight=False, markup=False, soft_wrap=True)
    return 1 if deviation["mode"] == "legal" and deviation["waiver"] is None else 0


def _answer(pool: Pool, job: Job) -> Answer:
    """The answer to one job; raises what the worker could not do."""
    from conformance.runner import failure_of

    (answer,) = pool.run([job])
    if answer.error is not None:
        raise failure_of(answer.error)
    return answer


@cli.command()
def clauses() -> None:
    """Print the specification: every clause, its source, where it is checked, and how often."""
    from conformance import last_run
    from conformance.words import FEATURES
    from reference.clauses import CLAUSES

    last = last_run.load(_cache())
    click.echo(_paragraph("last run: ", last.line() if last is not None else "no run yet"))
    for clause in CLAUSES.values():
        box = "black box" if clause.black_box else "white box"
        click.echo()
        click.echo(_paragraph(f"{clause.number:<5}", clause.statement))
        click.echo(_paragraph("     source    ", clause.source))
        click.echo(_paragraph("     checked   ", f"at {', '.join(clause.calls)} ({box})"))
        if clause.wild:
            click.echo(_paragraph("     wild      ", clause.wild))
            click.echo(_paragraph("               ", f"at {', '.join(clause.wild_calls)}"))
        if clause.needs:
            click.echo(
                _paragraph(
                    "     needs     ", FEATURES.get(clause.needs, clause.needs.replace("_", " "))
                )
            )
        reached = last.reached(clause.number) if last is not None else "no run yet"
        click.echo(_paragraph("     reached   ", reached))


def _paragraph(lead: str, text: str) -> str:
    """`text` after `lead`, its further lines below its first, in 100 columns."""
    return textwrap.fill(
        text,
        100,
        initial_indent=lead,
        subsequent_indent=" " * len(lead),
        break_long_words=False,
        break_on_hyphens=False,
    )


@cli.command()
@click.argument("releases", nargs=-1, required=True)
@click.option("--offline", is_flag=True, help="Only check what is cached.")
def fetch(releases: tuple[str, ...], offline: bool) -> None:
    """Fetch releases into the cache (10 to 40 MB each)."""
    from conformance.sut.source import locate, release_range

    for text in releases:
        for name in release_range(text) if ".." in text else [text]:
            tree = locate(name, offline=offline)
            if tree.kind != "release":
                raise UserError(f"{name} is not a release; there is nothing to fetch")
            click.echo(f"{name}  {tree.root}")


def _accepted(further: Path | None) -> list[Waiver]:
    """The packaged waivers and the user's."""
    from conformance import waivers

    return waivers.load() + (waivers.load(further) if further is not None else [])


def _console() -> Console:
    from rich.console import Console

    return Console()


def _cache() -> Path:
    from conformance.sut.source import cache_root

    return cache_root()


def _pool(options: dict[str, Any], size: int | None = None) -> Pool:
    from conformance.pool import Pool

    return Pool(_cache(), size=size, device=options["device"])


def _trees(
    specs: list[str],
    *,
    device: str,
    imports: str,
    offline: bool,
    declare: Path | None,
    mapped: tuple[str, ...],
) -> tuple[list[Tree], dict[str, Any]]:
    """Locate the trees, and read what the user says about them and about where to run them."""
    from conformance.declarations import read_declarations, read_map
    from conformance.sut.source import locate

    if imports != "isolated":
        raise UserError("this version loads trees isolated only; leave --imports out")
    options = {
        "relocated": read_map(mapped),
        "declared": read_declarations(declare) if declare is not None else [],
        "device": device,
    }
    return [locate(spec, offline=offline) for spec in specs], options


def main() -> None:
    """Run the command line; every expected failure is one line and an exit status."""
    from conformance.runner import SuiteFault

    try:
        cli(standalone_mode=False)
    except UserError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_status)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except click.Abort:
        click.echo("interrupted", err=True)
        sys.exit(130)
    except SuiteFault as error:
        click.echo(f"fault of the suite: {error}", err=True)
        sys.exit(3)
    except Exception as error:
        click.echo(f"fault of the suite: {type(error).__name__}: {error}", err=True)
        traceback.print_exc()
        sys.exit(3)


if __name__ == "__main__":
    main()
