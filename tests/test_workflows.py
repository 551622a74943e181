"""The CI files of docs/ci: they are valid and safe, and every command in them does its work.

GitHub's runners are not here, so :class:`Job` stands in for one: it evaluates the expressions,
keeps the environment and the files that GitHub promises, lays out what the actions would, and gives
every ``run`` step to bash as GitHub does. It refuses what it does not know, and :data:`RUN` lists
every command, so a file cannot come to hold one that nothing here has run.

Two things are made quicker. tox is the real one with the real ``tox.ini``, but it does not install
the suite, which takes minutes: it uses this environment's. And ``dflash-conformance`` is the real
program with smaller budgets.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_repository import SmallRepository, file_of

from conformance.sut.source import SUPPORTED, locate
from conformance.sut.surface import ARGUMENTS, REAL

ROOT = Path(__file__).parent.parent
FILES = {path.name: path for path in sorted((ROOT / "docs" / "ci").glob("*.yml"))}
CPU, GPU = "gate.yml", "gate-gpu.yml"

RUN = {
    (CPU, "pull_request"): ["Find the commits", "Install tox", "Gate", "Summary"],
    (CPU, "workflow_dispatch"): ["Find the commits", "Install tox", "Gate", "Summary"],
    (GPU, "pull_request"): ["Find the commits", "Install tox", "Gate", "Summary"],
    (GPU, "schedule"): ["Find the commits", "Install tox", "Nightly search", "Summary"],
}
"""The ``run`` steps that an event must reach, failures or not."""

# The change that put DFlash's tokens into another channel, of another type.
BEFORE, AFTER = "0.5.14", "0.5.15"

Workflow = dict[Any, Any]


def load(name: str) -> Workflow:
    workflow: Workflow = yaml.safe_load(FILES[name].read_text(encoding="utf-8"))
    workflow["on"] = workflow.pop(True)  # YAML 1.1 reads the key as a truth value
    return workflow


def jobs(name: str) -> list[dict[str, Any]]:
    return list(load(name)["jobs"].values())


def steps(name: str) -> list[dict[str, Any]]:
    return [step for job in jobs(name) for step in job["steps"]]


# -- what can be read off the files ---------------------------------------------------------------


def test_the_files_are_those_that_are_tested() -> None:
    assert FILES.keys() == {CPU, GPU}


@pytest.mark.parametrize("name", FILES)
def test_file_is_a_github_workflow(name: str) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "check_jsonschema"),
            *("--builtin-schema", "vendor.github-workflows", str(FILES[name])),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", FILES)
def test_file_is_safe(name: str) -> None:
    workflow, text = load(name), FILES[name].read_text(encoding="utf-8")
    assert workflow["permissions"] == {"contents": "read"}
    assert not any("permissions" in job for job in jobs(name))
    assert workflow["concurrency"]["cancel-in-progress"] is True
    assert all(job["timeout-minutes"] for job in jobs(name))
    assert "secrets" not in re.sub(r"#.*", "", text)
    assert "pull_request_target" not in text
    for step in steps(name):
        # Text from an event reaches a shell through its environment only.
        assert "${{" not in step.get("run", ""), step["name"]
        if "uses" in step:
            assert re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"])
        if step.get("uses", "").startswith("actions/checkout"):
            assert step["with"]["persist-credentials"] is False


def test_both_files_watch_the_same_sources() -> None:
    own = {name: f".github/workflows/dflash-{name}" for name in FILES}
    watched = {name: load(name)["on"]["pull_request"]["paths"] for name in FILES}
    assert all(own[name] in watched[name] for name in FILES)
    cpu, gpu = ([p for p in watched[name] if p != own[name]] for name in (CPU, GPU))
    assert cpu == gpu


def test_watched_sources_are_those_that_are_loaded() -> None:
    watched = [p for p in load(CPU)["on"]["pull_request"]["paths"] if p.startswith("python/")]
    for module in (*REAL, ARGUMENTS):
        path = f"python/{file_of(module)}"
        assert any(fnmatch.fnmatchcase(path, pattern) for pattern in watched), path
    for pattern in watched:
        below = pattern.removeprefix("python/")
        assert any(list(locate(r).root.glob(below)) for r in SUPPORTED), f"{pattern} names nothing"


@pytest.mark.parametrize("environment", ["gate", "gpu"])
def test_paths_are_relative_to_where_tox_was_started(environment: str, tmp_path: Path) -> None:
    command = f"'{sys.executable}' -m tox config -c '{ROOT}' -e {environment} -k change_dir"
    done = subprocess.run(
        ["bash", "-c", f"{command} --workdir .tox"], cwd=tmp_path, capture_output=True, text=True
    )
    assert f"change_dir = {tmp_path}" in done.stdout.splitlines(), done.stdout + done.stderr


@pytest.mark.parametrize("name", FILES)
def test_every_command_is_run_here(name: str) -> None:
    commands = {step["name"] for step in steps(name) if "run" in step}
    assert commands == {step for (file, _), run in RUN.items() if file == name for step in run}


# -- a stand-in for a runner ----------------------------------------------------------------------

_TOKEN = re.compile(r"\s*('[^']*'|\d+|\|\||&&|==|!=|[a-zA-Z_][\w.-]*(?:\([^()]*\))?)")


@dataclass
class Job:
    """One job of a workflow, run step by step.

    Attributes:
        name: the workflow's file name.
        values: what expressions read, by their dotted names.
        workspace, temporary: the runner's folders.
        sglang, suite: the repositories that are checked out.
        programs: folder that comes first on PATH.
        printed, status: of every ``run`` step that ran, by its name.
        artifacts: what was uploaded.
    """

    name: str
    values: dict[str, Any]
    workspace: Path
    temporary: Path
    sglang: Path
    suite: Path
    programs: Path
    printed: dict[str, str] = field(default_factory=dict)
    status: dict[str, int] = field(default_factory=dict)
    artifacts: dict[str, list[str]] = field(default_factory=dict)

    # -- expressions

    def value(self, expression: str) -> Any:
        """What an expression is; a name that is not known fails."""
        code, at = "", 0
        while at < len(expression.rstrip()):
            token = _TOKEN.match(expression, at)
            assert token, f"not understood: {expression[at:]!r} in {expression!r}"
            at, text = token.end(), token[1]
            if text in ("||", "&&"):
                code += {"||": " or ", "&&": " and "}[text]
            elif text in ("==", "!=") or text[0] in "'0123456789":
                code += text
            else:
                code += repr(self._name(text))
        return eval(code)

    def _name(self, name: str) -> Any:
        if name == "always()":
            return True
        if name.startswith("hashFiles("):
            for path in re.findall(r"'([^']*)'", name):
                assert (self.workspace / path).is_file(), f"{name} hashes nothing"
            return "0123abcd"
        return self.values[name]

    def text(self, template: Any) -> str:
        """A value of the file with its expressions filled in."""

        def fill(match: re.Match[str]) -> str:
            return str(self.value(match[1].strip()))

        return re.sub(r"\$\{\{(.*?)\}\}", fill, str(template))

    # -- steps

    def run(self) -> Job:
        """Run the job; what it did is in the attributes."""
        workflow = load(self.name)
        (job,) = workflow["jobs"].values()
        assert job.keys() <= {"name", "if", "runs-on", "timeout-minutes", "steps"}
        assert workflow["defaults"] == {"run": {"shell": "bash"}}
        if "if" in job and not self.value(job["if"]):
            return self
        environment = {
            **{n: v for n, v in os.environ.items() if not n.startswith(("GITHUB_", "TOX_"))},
            **{n: self.text(v) for n, v in workflow.get("env", {}).items()},
        }
        self.values |= {f"env.{n}": environment[n] for n in workflow.get("env", {})}
        failed = False
        for step in job["steps"]:
            assert step.keys() <= {"name", "id", "if", "uses", "with", "env", "run"}, step
            condition = step.get("if", "success()")
            if failed and condition != "always()":
                continue
            if condition != "success()" and not self.value(condition):
                continue
            if "uses" in step:
                self._use(step["uses"], step.get("id"), step.get("with", {}))
            else:
                failed |= self._bash(step, environment) != 0
        return self

    def _bash(self, step: dict[str, Any], environment: Mapping[str, str]) -> int:
        script = self.temporary / "script.sh"
        script.write_text(step["run"], encoding="utf-8")
        output = self.temporary / "output"
        output.write_text("")
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)],
            cwd=self.workspace,
            env={
                **environment,
                "PATH": os.pathsep.join(
                    (str(self.programs), str(Path(sys.executable).parent), os.environ["PATH"])
                ),
                "CI": "true",
                "GITHUB_ACTIONS": "true",
                "GITHUB_OUTPUT": str(output),
                "GITHUB_STEP_SUMMARY": str(self.temporary / "summary"),
                "GITHUB_WORKSPACE": str(self.workspace),
                "GITHUB_RUN_NUMBER": "12",
                "RUNNER_TEMP": str(self.temporary),
                "TOX_SKIP_PKG_INSTALL": "1",
                "TOX_OVERRIDE": "testenv.allowlist_externals=dflash-conformance",
                # No machine that runs this test has a GPU then.
                "CUDA_VISIBLE_DEVICES": "",
                **{n: self.text(v) for n, v in step.get("env", {}).items()},
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.printed[step["name"]] = done.stdout
        self.status[step["name"]] = done.returncode
        for line in output.read_text().splitlines():
            key, _, value = line.partition("=")
            self.values[f"steps.{step['id']}.outputs.{key}"] = value
        return done.returncode

    def _use(self, action: str, identity: str | None, inputs: Mapping[str, Any]) -> None:
        asked = {name: self.text(value) for name, value in inputs.items()}
        match action.partition("@")[0]:
            case "actions/checkout":
                self._check_out(asked)
            case "actions/setup-python":
                self.values[f"steps.{identity}.outputs.python-version"] = asked["python-version"]
            case "actions/cache":
                assert asked["key"].startswith(asked["restore-keys"].strip())
            case "actions/upload-artifact":
                folder = Path(asked["path"])
                found = [str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()]
                self.artifacts[asked["name"]] = sorted(found)
            case _:
                raise AssertionError(f"nothing here stands in for {action}")

    def _check_out(self, asked: Mapping[str, str]) -> None:
        """As the action does: only what was asked for is there afterwards."""
        source = self.suite if "repository" in asked else self.sglang
        folder = self.workspace / asked["path"]
        folder.mkdir()
        depth = asked.get("fetch-depth", "1")
        for arguments in (
            ("init", "--quiet"),
            ("remote", "add", "origin", f"file://{source}"),
            ("fetch", "--quiet", "--no-tags", f"--depth={depth}", "origin", asked["ref"])
            if depth != "0"
            else ("fetch", "--quiet", "--tags", "origin", "+refs/heads/*:refs/remotes/origin/*"),
            ("checkout", "--quiet", "FETCH_HEAD" if depth != "0" else asked["ref"]),
        ):
            done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr

    @property
    def summary(self) -> str:
        """What the job's page shows."""
        path = self.temporary / "summary"
        return path.read_text(encoding="utf-8") if path.exists() else ""


@dataclass
class Repositories:
    """What the runner can reach: SGLang with a few branches, and the suite's own files."""

    sglang: SmallRepository
    suite: Path
    programs: Path
    merge: str


SMALLER = """\
#!{python}
from conformance import cli, runner
# Enough to reach everything.
for name in ("quick", "pr", "nightly"):
    runner.PROFILES[name] = runner.Profile(name, 3_000, 2_000, 0, kv=1_000)
cli.main()
"""


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Repositories:
    """SGLang has ``main``, ``refactoring`` (same behaviour) and ``change`` (a pull request)."""
    folder = tmp_path_factory.mktemp("repositories")
    sglang = SmallRepository(folder / "sglang")
    sglang.lay(BEFORE)
    sglang.commit("main")
    sglang.git("tag", "v1")
    sglang.git("switch", "--quiet", "--create", "refactoring")
    overlap = sglang.sources / file_of("sglang.srt.managers.overlap_utils")
    overlap.write_text(overlap.read_text(encoding="utf-8") + "\n# A comment.\n", encoding="utf-8")
    sglang.commit("refactoring")
    sglang.git("switch", "--quiet", "--create", "change", "main")
    sglang.lay(AFTER)
    sglang.commit("change")
    sglang.git("switch", "--quiet", "main")
    (sglang.path / "README.md").write_text("Somebody else's work.\n")
    sglang.commit("more on main")

    suite = SmallRepository(folder / "suite")
    for name in ("tox.ini", "constraints.txt", "pyproject.toml"):
        shutil.copyfile(ROOT / name, suite.path / name)
    suite.commit("suite")

    programs = folder / "programs"
    programs.mkdir()
    program = programs / "dflash-conformance"
    program.write_text(SMALLER.format(python=sys.executable), encoding="utf-8")
    program.chmod(0o755)
    return Repositories(sglang, suite.path, programs, merge_of(sglang))


def merge_of(sglang: SmallRepository) -> str:
    """The commit that GitHub checks out for a pull request of ``change`` into ``main``."""
    sglang.git("switch", "--quiet", "--detach", "main")
    sglang.git("merge", "--quiet", "--no-ff", "--no-edit", "change")
    sglang.git("update-ref", "refs/pull/7/merge", "HEAD")
    merge = sglang.git("rev-parse", "HEAD").strip()
    sglang.git("switch", "--quiet", "main")
    return merge


def job(name: str, event: str, repositories: Repositories, folder: Path, **values: Any) -> Job:
    """A job for an event; `values` are inputs and other things that expressions read."""
    merge = repositories.merge if event == "pull_request" else None
    main = repositories.sglang.git("rev-parse", "main").strip()
    given = {
        "github.event_name": event,
        "github.repository": "sglang/sglang",
        "github.event.pull_request.head.repo.full_name": "sglang/sglang",
        "github.sha": merge or main,
        "runner.os": "Linux",
        "github.workspace": str(folder / "workspace"),
        "runner.temp": str(folder / "temporary"),
        **{f"inputs.{name}": "" for name in load(name)["on"]["workflow_dispatch"]["inputs"]},
        **values,
    }
    for path in ("workspace", "temporary"):
        (folder / path).mkdir(parents=True)
    return Job(
        name,
        given,
        folder / "workspace",
        folder / "temporary",
        repositories.sglang.path,
        repositories.suite,
        repositories.programs,
    )


# -- jobs -----------------------------------------------------------------------------------------


def test_an_unknown_expression_fails(repositories: Repositories, tmp_path: Path) -> None:
    stand_in = job(CPU, "pull_request", repositories, tmp_path)
    assert stand_in.value("inputs.base || 'main' && 2") == 2
    assert stand_in.value("github.event_name == 'schedule' || 0") == 0
    with pytest.raises(KeyError):
        stand_in.value("github.token")
    with pytest.raises(AssertionError, match="not understood"):
        stand_in.value("2 > 1")


def test_a_pull_request_that_changes_behaviour_fails_until_it_is_accepted(
    repositories: Repositories, tmp_path: Path
) -> None:
    first = job(CPU, "pull_request", repositories, tmp_path / "first").run()
    assert list(first.status) == RUN[CPU, "pull_request"]
    assert first.status == {"Find the commits": 0, "Install tox": 0, "Gate": 1, "Summary": 0}
    # What it would be merged into, though main has moved on since it branched off.
    assert f"@{repositories.sglang.git('rev-parse', 'main').strip()} to " in first.summary
    assert f"@{repositories.merge}\n\n**behaviour changed" in first.summary
    assert "verified_id renamed to bonus_tokens" in first.summary
    assert "::error title=DFlash hand-over::" in first.printed["Summary"]
    assert {"report.json", "junit.xml", "accept.toml"} <= set(first.artifacts["dflash-gate"])

    # The author copies the proposed record, completes it, and commits it to the same branch.
    record = (first.temporary / "report" / "accept.toml").read_text(encoding="utf-8")
    for key in ("link", "reason"):
        record = record.replace(f'{key} = ""', f'{key} = "pull request 29118"')
    repositories.sglang.git("switch", "--quiet", "change")
    file = repositories.sglang.path / ".github" / "dflash-accept.toml"
    file.parent.mkdir()
    file.write_text(record, encoding="utf-8")
    repositories.sglang.commit("accept it")
    merged = replace(repositories, merge=merge_of(repositories.sglang))
    again = job(CPU, "pull_request", merged, tmp_path / "again").run()
    assert "--accept sglang/.github/dflash-accept.toml" in again.printed["Gate"]
    assert set(again.status.values()) == {0}, again.printed["Gate"]
    assert "::error" not in again.printed["Summary"]


def test_commits_named_by_hand(repositories: Repositories, tmp_path: Path) -> None:
    inputs = {"inputs.base": "v1", "inputs.head": "refactoring", "inputs.profile": "quick"}
    done = job(CPU, "workflow_dispatch", repositories, tmp_path, **inputs).run()
    assert list(done.status) == RUN[CPU, "workflow_dispatch"]
    assert set(done.status.values()) == {0}, done.printed["Gate"]
    assert "--profile quick" in done.printed["Gate"]
    assert "preserved" in done.summary
    assert "::error" not in done.printed["Summary"]


def test_a_base_that_does_not_exist(repositories: Repositories, tmp_path: Path) -> None:
    inputs = {"inputs.base": "no/such; branch", "inputs.head": "main"}
    done = job(CPU, "workflow_dispatch", repositories, tmp_path, **inputs).run()
    assert done.status == {"Find the commits": 2, "Summary": 0}
    assert "::error" in done.printed["Find the commits"]
    assert "no verdict" in done.summary
    assert done.artifacts == {"dflash-gate": []}


@pytest.mark.parametrize("event", ["pull_request", "schedule"])
def test_without_a_gpu_the_gpu_job_is_refused(
    repositories: Repositories, tmp_path: Path, event: str
) -> None:
    done = job(GPU, event, repositories, tmp_path).run()
    assert list(done.status) == RUN[GPU, event]
    failed = {name for name, status in done.status.items() if status}
    (command,) = failed
    assert command == RUN[GPU, event][2]
    assert done.status[command] == 2, done.printed[command]
    refusals = [x for x in done.printed[command].splitlines() if x.startswith("error: ")]
    assert len(refusals) == 1, done.printed[command]
    assert re.search("cuda|gpu|--device", refusals[0], re.IGNORECASE)
    assert "no verdict" in done.summary


def test_pull_requests_from_forks_do_not_reach_the_gpu_runner(
    repositories: Repositories, tmp_path: Path
) -> None:
    fork = {"github.event.pull_request.head.repo.full_name": "somebody/sglang"}
    assert not job(GPU, "pull_request", repositories, tmp_path, **fork).run().status
