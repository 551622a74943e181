"""Locating and fetching trees, with the real pip and the real git."""

import base64
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from conformance.errors import NoEntryPoint, UserError
from conformance.sut import source
from conformance.sut.source import MANIFEST, Tree, locate, release_range

ROOT = Path(__file__).parents[1]  # where a child process finds the package
SMALL = "0.5.14"  # the smallest wheel of the supported matrix
SOURCES = {"sglang/__init__.py": "ANSWER = 42\n", "sglang/srt/managers/relay.py": "x = 1\n"}
LOCATE = "import sys; from conformance.sut.source import locate; print(locate(sys.argv[1]).root)"


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds the small release."""
    folder = tmp_path_factory.mktemp("cache")
    locate(SMALL, cache=folder)
    return folder


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pip whose only index is a port that nobody listens on."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("PIP_RETRIES", "0")


def make_wheel(
    folder: Path, version: str = "0.0.1", *, lies: bool = False, extra: dict[str, str] | None = None
) -> Path:
    """Write a wheel that pip accepts; with `lies`, RECORD does not match the sources."""
    info = f"sglang-{version}.dist-info"
    files = {
        **SOURCES,
        "sglang/data.json": "{}",
        "other/module.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, text in files.items():
        digest = hashlib.sha256((text + "# changed" * lies).encode()).digest()
        record += f"{name},sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()},1\n"
    wheel = folder / f"sglang-{version}-py3-none-any.whl"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in {**files, **(extra or {}), f"{info}/RECORD": record}.items():
            archive.writestr(name, text)
    return wheel


def git(repository: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    return subprocess.run(
        ["git", *identity, *arguments], cwd=repository, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A checkout with two commits, the first tagged `old`, and an uncommitted change."""
    folder = tmp_path / "work@home" / "checkout"
    package = folder / "python" / "sglang"
    (package / "srt").mkdir(parents=True)
    git(folder, "init", "-q")
    (package / "__init__.py").write_text("STATE = 'old'\n")
    (package / "srt" / "gone.py").write_text("")
    (package / "notes.md").write_text("not a source")
    (package / "link.py").symlink_to("notes.md")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "old")
    git(folder, "tag", "old")
    (package / "__init__.py").write_text("STATE = 'new'\n")
    git(folder, "rm", "-q", "python/sglang/srt/gone.py")
    git(folder, "commit", "-qam", "new")
    (package / "__init__.py").write_text("STATE = 'dirty'\n")
    return folder


def sources(root: Path) -> dict[str, str]:
    return {
        path.relative_to(root).as_posix(): path.read_text()
        for path in root.rglob("*")
        if path.is_file() and path.name != MANIFEST
    }


def refusal(spec: str, cache: Path, *, offline: bool = False) -> str:
    """Return the one line that refuses `spec`."""
    with pytest.raises(UserError) as caught:
        locate(spec, cache=cache, offline=offline)
    message = str(caught.value)
    assert message.splitlines() == [message]
    assert ": " in message, "says what to do"
    return message


def leftovers(cache: Path) -> list[Path]:
    """What is in the cache besides trees and lock files."""
    return [
        path
        for path in cache.glob("*/*")
        if not (path / MANIFEST).exists() and path.suffix != ".lock"
    ]


def test_a_message_is_one_line() -> None:
    assert str(UserError("first\n  second\r\nthird")) == "first second third"
    assert (UserError.exit_status, NoEntryPoint.exit_status) == (2, 125)
    assert issubclass(NoEntryPoint, UserError)


# ---- release ranges ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.5.20", ["0.5.20"]),
        ("0.5.14..0.5.16", ["0.5.14", "0.5.15", "0.5.16"]),
        ("0.5.23..0.5.23", ["0.5.23"]),
        ("0.5.14..0.5.23", list(source.SUPPORTED)),
        ("0.5.22, 0.5.14", ["0.5.22", "0.5.14"]),
        ("0.5.15,0.5.14..0.5.16", ["0.5.15", "0.5.14", "0.5.16"]),
    ],
)
def test_range(text: str, expected: list[str]) -> None:
    assert release_range(text) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0.5.23..0.5.14", "backwards: write 0.5.14..0.5.23"),
        ("0.5.13..0.5.15", "'0.5.13'"),
        ("0.5.14..", "''"),
        ("..", "''"),
        ("", "''"),
        ("0.5.14,,0.5.15", "''"),
        ("newest", "'newest'"),
        ("0.5.14...0.5.16", "'.0.5.16'"),
    ],
)
def test_a_bad_range_is_refused(text: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        release_range(text)
    assert says in str(caught.value)


# ---- releases ------------------------------------------------------------------------------------


def test_release(cache: Path) -> None:
    tree = locate(SMALL, cache=cache, offline=True)
    assert tree == Tree(SMALL, cache / "releases" / SMALL, "release", version=SMALL)
    assert json.loads(json.dumps(tree.as_json())) == {
        "label": SMALL,
        "root": str(tree.root),
        "kind": "release",
        "version": SMALL,
        "commit": None,
    }
    manifest = json.loads((tree.root / MANIFEST).read_text())
    assert manifest["version"] == SMALL
    assert manifest["wheel"].startswith(f"sglang-{SMALL}-")
    assert len(manifest["wheel_sha256"]) == 64
    assert "sglang/srt/managers/overlap_utils.py" in manifest["files"]
    assert sources(tree.root).keys() == manifest["files"].keys()
    assert not leftovers(cache)


def test_a_version_is_normalised(cache: Path) -> None:
    tree = locate(f"v{SMALL}", cache=cache, offline=True)
    assert (tree.label, tree.version) == (f"v{SMALL}", SMALL)


def test_a_cached_release_needs_no_network(cache: Path, no_index: None) -> None:
    assert locate(SMALL, cache=cache).root.is_dir()


def test_the_cache_folder_comes_from_the_environment(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(source.CACHE_VARIABLE, str(cache))
    assert locate(SMALL, offline=True).root == cache / "releases" / SMALL
    monkeypatch.setenv(source.CACHE_VARIABLE, "")
    assert source.cache_root().name == "dflash-conformance"


def test_unknown_release(tmp_path: Path) -> None:
    message = refusal("99.9.9", tmp_path)
    assert "pip finds no SGLang 99.9.9" in message
    assert "newest it offers: " in message
    assert not leftovers(tmp_path)


def test_no_network(tmp_path: Path, no_index: None) -> None:
    assert "could not reach" in refusal(SMALL, tmp_path)


def test_no_index_at_all(tmp_path: Path, no_index: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert "pip finds no release of it at all" in refusal(SMALL, tmp_path)


def test_offline_with_an_empty_cache(tmp_path: Path) -> None:
    message = refusal(SMALL, tmp_path / "cache", offline=True)
    assert f"SGLang {SMALL} is not in the cache" in message
    assert f"dflash-conformance fetch {SMALL}" in message
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("place", ["file/cache", "file"])
def test_unwritable_cache(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    message = refusal(SMALL, tmp_path / place)
    assert "cannot write to the cache" in message
    assert source.CACHE_VARIABLE in message


def test_two_processes_fetch_at_once(tmp_path: Path) -> None:
    environment = {**os.environ, source.CACHE_VARIABLE: str(tmp_path)}
    both = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import logging; logging.basicConfig(level='INFO'); {LOCATE}",
                SMALL,
            ],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert {out.strip() for out, _ in said} == {str(tmp_path / "releases" / SMALL)}
    assert sum(err.count(f"fetching SGLang {SMALL}") for _, err in said) == 1, "the other waited"
    locate(SMALL, cache=tmp_path, offline=True)
    assert not leftovers(tmp_path)


def test_pip_that_offers_a_broken_wheel(
    tmp_path: Path, no_index: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    cache = tmp_path / "cache"
    make_wheel(tmp_path / "links", lies=True)
    assert "differs from RECORD" in refusal("0.0.1", cache)
    wheel = make_wheel(tmp_path / "links")
    whole = wheel.read_bytes()
    wheel.write_bytes(whole[: len(whole) // 2])
    assert "0.0.1 cannot be fetched" in refusal("0.0.1", cache)
    assert not leftovers(cache)
    wheel.write_bytes(whole)
    assert sources(locate("0.0.1", cache=cache).root) == SOURCES


@pytest.mark.parametrize(
    "tag", ["cp313-cp313-macosx_11_0_arm64", "cp312-abi3-manylinux_2_39_aarch64"]
)
def test_any_platform_will_do(
    tmp_path: Path, no_index: None, monkeypatch: pytest.MonkeyPatch, tag: str
) -> None:
    wheel = make_wheel(tmp_path / "links")
    wheel.rename(wheel.with_name(f"sglang-0.0.1-{tag}.whl"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    assert sources(locate("0.0.1", cache=tmp_path / "cache").root) == SOURCES


# ---- damage and interruption ---------------------------------------------------------------------


def damage_changed(root: Path) -> None:
    path = root / "sglang" / "__init__.py"
    path.write_text(path.read_text().replace("4", "5", 1))


def damage_missing(root: Path) -> None:
    (root / "sglang" / "srt" / "managers" / "relay.py").unlink()


def damage_extra(root: Path) -> None:
    (root / "sglang" / "stray.py").touch()


def damage_manifest(root: Path) -> None:
    (root / MANIFEST).write_text('{"files": ')


def damage_no_manifest(root: Path) -> None:
    (root / MANIFEST).unlink()


def damage_wrong_manifest(root: Path) -> None:
    (root / MANIFEST).write_text("[]")


@pytest.mark.parametrize(
    "damage",
    [
        damage_changed,
        damage_missing,
        damage_extra,
        damage_manifest,
        damage_no_manifest,
        damage_wrong_manifest,
    ],
)
def test_a_damaged_tree_is_built_again(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    spec = str(make_wheel(tmp_path))
    cache = tmp_path / "cache"
    root = locate(spec, cache=cache).root
    untouched = (root / MANIFEST).stat().st_mtime_ns
    locate(spec, cache=cache)
    assert (root / MANIFEST).stat().st_mtime_ns == untouched, "a sound tree is left alone"
    damage(root)
    assert locate(spec, cache=cache).root == root
    assert sources(root) == SOURCES
    assert not leftovers(cache)


def test_a_damaged_release_is_fetched_again_unless_offline(cache: Path, tmp_path: Path) -> None:
    shutil.copytree(cache, tmp_path / "cache")
    cache = tmp_path / "cache"
    broken = cache / "releases" / SMALL / "sglang" / "srt" / "managers" / "overlap_utils.py"
    sound = broken.read_text()
    broken.write_text(sound[:-1])
    message = refusal(SMALL, cache, offline=True)
    assert "damaged in the cache (sglang/srt/managers/overlap_utils.py)" in message
    locate(SMALL, cache=cache)
    assert broken.read_text() == sound


def test_what_a_killed_fetch_left_is_swept(tmp_path: Path) -> None:
    spec = str(make_wheel(tmp_path))
    cache = tmp_path / "cache"
    root = locate(spec, cache=cache).root
    half = root.parent / f".{root.name}-abc123"
    root.rename(half)
    (half / MANIFEST).unlink()
    root.mkdir()  # a target without a manifest
    assert locate(spec, cache=cache).root == root
    assert sources(root) == SOURCES
    assert not leftovers(cache)


def test_a_process_killed_while_unpacking(tmp_path: Path) -> None:
    many = {f"sglang/m{number}.py": "x = 1\n" for number in range(3000)}
    wheel = make_wheel(tmp_path)
    info = "sglang-0.0.1.dist-info/RECORD"
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"x = 1\n").digest()).rstrip(b"=").decode()
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in many.items():
            archive.writestr(name, text)
        archive.writestr(info, "".join(f"{name},sha256={digest},6\n" for name in many))
    environment = {**os.environ, source.CACHE_VARIABLE: str(tmp_path / "cache")}
    process = subprocess.Popen(
        [sys.executable, "-c", LOCATE, str(wheel)], cwd=ROOT, env=environment
    )
    while not list(tmp_path.glob("cache/wheels/.*/tree/sglang/m1*.py")):
        assert process.poll() is None, "it finished before it could be killed"
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert leftovers(tmp_path / "cache"), "the kill came too late to test anything"
    tree = locate(str(wheel), cache=tmp_path / "cache")
    assert sources(tree.root) == many
    assert not leftovers(tmp_path / "cache")


# ---- wheel files ---------------------------------------------------------------------------------


def test_wheel_file(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    tree = locate(str(wheel), cache=tmp_path / "cache", offline=True)
    assert (tree.kind, tree.version, tree.label) == ("release", "0.0.1", str(wheel))
    assert tree.root.name == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert sources(tree.root) == SOURCES
    assert wheel.exists()


def test_a_corrupt_wheel_is_refused_wherever_it_is_cut_or_changed(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    whole = wheel.read_bytes()
    cache = tmp_path / "cache"
    for length in range(0, len(whole), 97):
        wheel.write_bytes(whole[:length])
        assert "is not a sound SGLang wheel" in refusal(str(wheel), cache)
    at = whole.index(b"ANSWER")
    wheel.write_bytes(whole[:at] + b"a" + whole[at + 1 :])
    assert "sglang/__init__.py" in refusal(str(wheel), cache)
    assert not leftovers(cache)


@pytest.mark.parametrize(
    ("extra", "lies", "says"),
    [
        ({}, True, "sglang/__init__.py differs from RECORD"),
        ({"sglang/unlisted.py": ""}, False, "not those that RECORD lists"),
    ],
)
def test_a_wheel_that_disagrees_with_its_record(
    tmp_path: Path, extra: dict[str, str], lies: bool, says: str
) -> None:
    wheel = make_wheel(tmp_path, lies=lies, extra=extra)
    assert says in refusal(str(wheel), tmp_path / "cache")


def test_a_file_that_would_leave_the_folder_is_not_unpacked(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, extra={"sglang/../../escaped.py": ""})
    root = locate(str(wheel), cache=tmp_path / "cache").root
    assert sources(root) == SOURCES
    assert not list(tmp_path.rglob("escaped.py"))


def test_not_an_sglang_wheel(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("other-1.0.dist-info/RECORD", "")
    assert "no RECORD" in refusal(str(tmp_path / "other.whl"), tmp_path)
    assert "cannot read the wheel" in refusal(str(tmp_path / "absent.whl"), tmp_path)


# ---- checkouts and refs --------------------------------------------------------------------------


def test_checkout(repository: Path, tmp_path: Path) -> None:
    head = git(repository, "rev-parse", "HEAD")
    tree = locate(str(repository), cache=tmp_path / "cache")
    assert tree == Tree(str(repository), repository / "python", "checkout", commit=f"{head}-dirty")
    git(repository, "checkout", "-q", ".")
    assert locate(str(repository)).commit == head
    (repository / "note").touch()  # not a source
    assert locate(str(repository)).commit == head
    (repository / "python" / "sglang" / "untracked.py").touch()
    assert locate(str(repository)).commit == f"{head}-dirty"
    assert locate(str(repository / "python")).root == repository / "python"
    assert not (tmp_path / "cache").exists()


def test_the_index_of_a_checkout_is_not_refreshed(repository: Path) -> None:
    git(repository, "checkout", "-q", ".")
    os.utime(repository / "python" / "sglang" / "__init__.py", (1, 1))
    before = (repository / ".git" / "index").read_bytes()
    locate(str(repository))
    assert (repository / ".git" / "index").read_bytes() == before


def test_a_copy_inside_another_repository_has_no_commit(repository: Path) -> None:
    copy = repository / "vendored"
    shutil.copytree(repository / "python" / "sglang", copy / "sglang", symlinks=True)
    tree = locate(str(copy))
    assert (tree.root, tree.commit) == (copy, None)


def test_ref(repository: Path, tmp_path: Path) -> None:
    def state() -> tuple[bytes, str]:
        return (repository / ".git" / "index").read_bytes(), git(repository, "status", "--short")

    before = state()
    head = locate(f"{repository}@HEAD", cache=tmp_path / "cache")
    old = locate(f"{repository}@old", cache=tmp_path / "cache", offline=True)
    assert state() == before
    assert sources(head.root) == {"sglang/__init__.py": "STATE = 'new'\n"}
    assert sources(old.root) == {"sglang/__init__.py": "STATE = 'old'\n", "sglang/srt/gone.py": ""}
    assert (repository / "python/sglang/__init__.py").read_text() == "STATE = 'dirty'\n"
    assert (old.kind, old.commit, old.version) == ("ref", git(repository, "rev-parse", "old"), None)
    assert old.root == tmp_path / "cache" / "refs" / str(old.commit)
    assert locate(f"{repository}@HEAD@{{1}}", cache=tmp_path / "cache").root == old.root
    # A branch is looked up again each time; only commits are cached.
    git(repository, "update-ref", "refs/heads/moving", "HEAD")
    assert locate(f"{repository}@moving", cache=tmp_path / "cache").root == head.root
    git(repository, "update-ref", "refs/heads/moving", "old")
    assert locate(f"{repository}@moving", cache=tmp_path / "cache").root == old.root
    assert not leftovers(tmp_path / "cache")


def test_ref_below_the_top_of_a_repository_and_of_a_bare_one(
    repository: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    old = sources(locate(f"{repository}@old", cache=cache).root)
    below = locate(f"{repository / 'python'}@old", cache=cache)
    assert sources(below.root) == old
    git(tmp_path, "clone", "-q", "--bare", str(repository), "bare")
    assert sources(locate(f"{tmp_path / 'bare'}@old", cache=tmp_path / "fresh").root) == old


def test_a_git_hook_does_not_redirect_us(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(tmp_path, "init", "-q", "elsewhere")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere" / ".git"))
    assert locate(f"{repository}@old", cache=tmp_path / "cache").kind == "ref"


def test_a_damaged_ref_is_extracted_again(repository: Path, tmp_path: Path) -> None:
    root = locate(f"{repository}@old", cache=tmp_path).root
    sound = sources(root)
    (root / "sglang" / "__init__.py").write_text("STATE = 'odd'\n")
    locate(f"{repository}@old", cache=tmp_path)
    assert sources(root) == sound


def test_no_such_ref(repository: Path, tmp_path: Path) -> None:
    for ref in ("nowhere", "", "-h", "HEAD:python", "old..HEAD"):
        assert f"has no commit '{ref}'" in refusal(f"{repository}@{ref}", tmp_path / "cache")


def test_no_sglang(repository: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "holds no SGLang" in refusal(str(empty), tmp_path)
    assert "is not a git repository" in refusal(f"{empty}@main", tmp_path)
    (empty / "sglang").mkdir()  # merely a folder of that name
    assert "holds no SGLang" in refusal(str(empty), tmp_path)
    (repository / "docs").mkdir()
    (repository / "docs" / "a.py").touch()
    git(repository, "add", "docs")
    git(repository, "rm", "-rqf", "python")
    git(repository, "commit", "-qm", "no sources")
    assert "holds no SGLang" in refusal(f"{repository}@HEAD", tmp_path)
    for spec in ("", "@", "@main", str(tmp_path / "absent"), f"{tmp_path / 'absent'}@main"):
        assert "names no SGLang" in refusal(spec, tmp_path)


def test_an_unreadable_commit(repository: Path, tmp_path: Path) -> None:
    blob = git(repository, "rev-parse", "old:python/sglang/srt/gone.py")
    (repository / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    assert "git could not read" in refusal(f"{repository}@old", tmp_path / "cache")
    assert not leftovers(tmp_path / "cache")


def test_git_is_missing(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert "git is not on PATH" in refusal(f"{repository}@HEAD", tmp_path / "cache")
    assert locate(str(repository)).commit is None


# ---- the installed package -----------------------------------------------------------------------


def test_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    tree = locate("installed")
    assert (tree.root, tree.kind, tree.label) == (tmp_path, "installed", "installed")


def test_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sglang").mkdir()  # merely a folder of that name
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert "is not installed" in refusal("installed", tmp_path)


def test_torch_is_not_imported() -> None:
    code = "import sys, conformance.sut.source; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
