"""Find the sources of an SGLang: a release, wheel, checkout, git ref or the installed package.

Releases, wheels and refs are unpacked into a cache, Python sources only. A folder in the cache is
either complete or absent: it is built beside its place, described by a manifest and renamed, and it
is compared with that manifest on every use. Nothing of SGLang is imported or run here.
"""

import base64
import csv
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal
from urllib.parse import quote

import platformdirs
from filelock import FileLock
from packaging.version import InvalidVersion, Version

from conformance.errors import UserError

SUPPORTED = tuple(f"0.5.{patch}" for patch in range(14, 24))
NEWEST = SUPPORTED[-1]

CACHE_VARIABLE = "DFLASH_CONFORMANCE_CACHE"
MANIFEST = "manifest.json"

# Any wheel of a release has the Python sources, so the tags are those that may exist, not those
# that this machine could run. Where several fit the order decides, so every machine gets the same.
_PYTHONS = ("3.11", "3.12", "3.13", "3.14", "3.10")
_PLATFORMS = (
    *(f"manylinux_2_{m}_{cpu}" for cpu in ("x86_64", "aarch64") for m in range(50, 16, -1)),
    *("manylinux2014_x86_64", "manylinux2014_aarch64", "linux_x86_64", "linux_aarch64"),
    *("macosx_26_0_arm64", "macosx_26_0_x86_64", "win_amd64", "win_arm64"),
)
# pip skips an index that it cannot reach and goes on; an index without the project is a plain 404.
_UNREACHABLE = re.compile(
    r"Could not fetch URL \S+: (?!404)|Max retries exceeded|[Tt]imed out|incomplete-download"
    r"|[Cc]onnection ?(?:refused|reset|aborted|broken|error)"
)
# Set while a git hook runs; they would redirect our git away from the repository that was named.
_GIT_OVERRIDES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_NAMESPACE")

_log = logging.getLogger(__name__)

Kind = Literal["release", "checkout", "ref", "installed"]


@dataclass(frozen=True)
class Tree:
    """The sources of one SGLang.

    `label` is what the user wrote, `root` the folder that directly holds `sglang/`. `commit` ends
    in `-dirty` when the checkout's sources have changes that are not committed.
    """

    label: str
    root: Path
    kind: Kind
    version: str | None = None
    commit: str | None = None

    def as_json(self) -> dict[str, str | None]:
        """Return the fields as JSON values."""
        return {**asdict(self), "root": str(self.root)}


def locate(spec: str, *, offline: bool = False, cache: Path | None = None) -> Tree:
    """Return the tree that `spec` names, fetched or unpacked into the cache where necessary.

    `spec` is `installed`, a wheel file, a release version, the path of a checkout, or PATH@REF. A
    version wins over a folder of that name; write `./0.5.23` for the folder.

    Raises:
        UserError: there is no such tree, or it cannot be fetched, unpacked or trusted.
    """
    if spec == "installed":
        return _installed()
    if spec.endswith(".whl"):
        return _wheel(spec, cache)
    if version := _as_version(spec):
        root = fetch(version, offline=offline, cache=cache)
        return Tree(spec, root, "release", version=version)
    if spec and Path(spec).expanduser().is_dir():
        return _checkout(spec)
    # Both a path and a ref may contain "@": the path is the longest part that is a folder.
    path, at, _ = spec.rpartition("@")
    while at:
        if path and Path(path).expanduser().is_dir():
            return _ref(spec, path, spec[len(path) + 1 :], cache)
        path, at, _ = path.rpartition("@")
    raise UserError(
        f"'{spec}' names no SGLang: give a release such as {NEWEST}, the path of a checkout or "
        "wheel that exists, PATH@REF, or 'installed'"
    )


def release_range(text: str) -> list[str]:
    """Return the supported releases that `text` names, such as `0.5.14..0.5.16,0.5.23`.

    Raises:
        UserError: a release is not in the supported matrix, or a range runs backwards.
    """
    chosen: list[str] = []
    for part in text.split(","):
        first, dots, last = (word.strip() for word in part.partition(".."))
        for version in (first, last) if dots else (first,):
            if version not in SUPPORTED:
                raise UserError(
                    f"'{version}' in '{text}' is not in the supported matrix: "
                    f"give releases from {SUPPORTED[0]} to {NEWEST}, as A..B or A,B"
                )
        low, high = SUPPORTED.index(first), SUPPORTED.index(last if dots else first)
        if low > high:
            raise UserError(f"the range '{part.strip()}' runs backwards: write {last}..{first}")
        chosen += SUPPORTED[low : high + 1]
    return list(dict.fromkeys(chosen))


def fetch(version: str, *, offline: bool = False, cache: Path | None = None) -> Path:
    """Return the folder with the sources of a release, downloaded by pip unless already cached.

    Which indexes pip asks is the user's pip configuration.

    Raises:
        UserError: no such release, no way to get it, or the cache cannot be written.
    """
    release = _as_version(version)
    if release is None:
        raise UserError(f"'{version}' is not a version: give one such as {NEWEST}")
    place = cache_root(cache) / "releases" / release
    if offline:
        if problem := _problem(place):
            raise UserError(
                f"SGLang {release} {problem} and fetching is switched off (--offline): "
                f"run `dflash-conformance fetch {release}` with network access first"
            )
        return place

    def build(into: Path, scratch: Path) -> dict[str, Any]:
        _log.info("fetching SGLang %s", release)
        return _unpack(_download(release, scratch), into)

    return _cached(place, build)


def cache_root(cache: Path | None = None) -> Path:
    """Return `cache`, else the folder that the environment names, else the user's cache folder."""
    chosen = cache or os.environ.get(CACHE_VARIABLE)
    if not chosen:
        return platformdirs.user_cache_path("dflash-conformance")
    return Path(chosen).expanduser().absolute()


def _as_version(text: str) -> str | None:
    try:
        return str(Version(text))
    except InvalidVersion:
        return None


# ---- the five kinds of tree ----------------------------------------------------------------------


def _installed() -> Tree:
    try:
        found = importlib.util.find_spec("sglang")
    except (ImportError, ValueError):
        found = None
    # A folder that happens to be called sglang is a namespace package, which has no origin.
    if found is None or not found.origin:
        raise UserError(
            f"SGLang is not installed for {sys.executable}: install it there, or name a release "
            f"such as {NEWEST}"
        )
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        version = None
    root = Path(found.origin).resolve().parent.parent
    return Tree("installed", root, "installed", version=version)


def _wheel(spec: str, cache: Path | None) -> Tree:
    wheel = Path(spec).expanduser()
    try:
        key = _sha256(wheel)
    except OSError as error:
        raise UserError(
            f"cannot read the wheel {spec} ({error.strerror}): check the path"
        ) from error
    root = _cached(cache_root(cache) / "wheels" / key, lambda into, _: _unpack(wheel, into))
    return Tree(
        spec, root, "release", version=json.loads((root / MANIFEST).read_bytes())["version"]
    )


def _checkout(spec: str) -> Tree:
    folder = Path(spec).expanduser().resolve()
    for root in (folder / "python", folder):
        if (root / "sglang" / "__init__.py").is_file():
            return Tree(spec, root, "checkout", commit=_checked_out_commit(root))
    raise UserError(
        f"{spec} holds no SGLang (neither python/sglang nor sglang): "
        "give the top folder of a checkout"
    )


def _checked_out_commit(root: Path) -> str | None:
    """Return the commit of a checkout, or None where git does not know these sources."""
    try:
        # A copy of SGLang inside an unrelated repository must not be given that one's commit.
        if _git(root, "rev-parse", "--verify", "HEAD:./sglang/__init__.py").returncode:
            return None
        commit = _git(root, "rev-parse", "HEAD").stdout.strip()
        # Not `git describe --dirty`: that one refreshes the index even without optional locks.
        changed = _git(root, "status", "--porcelain", "--", "sglang").stdout
    except UserError:
        return None
    return f"{commit}-dirty" if changed else commit


def _ref(spec: str, path: str, ref: str, cache: Path | None) -> Tree:
    folder = Path(path).expanduser().resolve()
    asked = _git(folder, "rev-parse", "--show-prefix", "--absolute-git-dir")
    if asked.returncode:
        raise UserError(
            f"{path} is not a git repository ({_last_line(asked.stderr)}): give one before the '@'"
        )
    prefix, git_dir = asked.stdout.splitlines()
    # With the repository named outright, paths are relative to its top and a bare one works too.
    in_repository = f"--git-dir={git_dir}"
    resolved = _git(folder, in_repository, "rev-parse", "--verify", f"{ref}^{{commit}}")
    if resolved.returncode:
        raise UserError(f"{path} has no commit '{ref}': check the name, or run git fetch there")
    commit = resolved.stdout.strip()
    for sources in (f"{prefix}python", prefix.rstrip("/")):
        package = f"{commit}:{sources}/sglang".replace(":/", ":")
        if not _git(folder, in_repository, "cat-file", "-e", f"{package}/__init__.py").returncode:
            break
    else:
        raise UserError(
            f"commit '{ref}' of {path} holds no SGLang (neither python/sglang nor sglang): "
            "choose another ref"
        )

    def build(into: Path, _: Path) -> dict[str, Any]:
        return _extract(folder, in_repository, f"{commit}:{sources}", into) | {"commit": commit}

    key = f"{commit}-{quote(prefix.rstrip('/'), safe='')}" if prefix else commit
    root = _cached(cache_root(cache) / "refs" / key, build)
    return Tree(spec, root, "ref", commit=commit)


# ---- the cache -----------------------------------------------------------------------------------


def _cached(place: Path, build: Callable[[Path, Path], dict[str, Any]]) -> Path:
    """Return `place`, built first if it is missing or damaged.

    `build(into, scratch)` writes the sources below `into` and returns their manifest; `scratch` is
    thrown away.
    """
    if _problem(place) is None:
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(place.parent / f"{place.name}.lock"):
            if _problem(place) is None:  # another process was faster
                return place
            for killed in place.parent.glob(f".{place.name}-*"):
                shutil.rmtree(killed, ignore_errors=True)
            scratch = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
            try:
                fresh = scratch / "tree"
                fresh.mkdir()
                manifest = build(fresh, scratch)
                (fresh / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
                if place.exists():
                    place.rename(scratch / "damaged")
                fresh.rename(place)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"cannot write to the cache {place.parent} ({error.strerror or error}): "
            f"make it writable, or set {CACHE_VARIABLE} to another folder"
        ) from error
    return place


def _problem(place: Path) -> str | None:
    """Say what keeps a cached tree from being used, or None.

    Every file is hashed: 68 MB in 4,719 files take 0.1 s, too little to be content with sizes.
    """
    try:
        manifest = (place / MANIFEST).read_bytes()
    except OSError:
        return "is not in the cache"
    try:
        recorded: dict[str, str] = json.loads(manifest)["files"]
        found = {name: _digest(content) for name, content in _python_files(place)}
        differing = recorded.items() ^ found.items()
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return f"is damaged in the cache ({MANIFEST})"
    return f"is damaged in the cache ({min(differing)[0]})" if differing else None


def _python_files(root: Path) -> Iterator[tuple[str, bytes]]:
    above = len(str(root)) + 1
    for folder, _, names in os.walk(root):
        for name in names:
            if name.endswith(".py"):
                path = os.path.join(
                    folder, name
                )  # half the time of pathlib, for thousands of files
                with open(path, "rb") as file:
                    yield path[above:].replace(os.sep, "/"), file.read()


def _digest(content: bytes) -> str:
    """Return the SHA-256 as a wheel's RECORD writes it."""
    encoded = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
    return f"sha256={encoded.rstrip(b'=').decode()}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_source(name: str) -> bool:
    """Tell whether an archive member is wanted; one that would leave the folder never is."""
    parts = PurePosixPath(name).parts
    return name.endswith(".py") and parts[0] == "sglang" and ".." not in parts


def _write(content: bytes, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


# ---- wheels --------------------------------------------------------------------------------------


def _download(version: str, scratch: Path) -> Path:
    """Let pip download any wheel of a release into `scratch`, and return it."""
    destination = scratch / "download"
    # What pip says on the console depends on the user's settings, its log does not.
    log = scratch / "pip.log"
    for python in _PYTHONS:
        command = [
            *(sys.executable, "-m", "pip", "download", f"sglang=={version}"),
            *("--no-deps", "--only-binary=:all:", "--dest", str(destination), "--log", str(log)),
            *("--no-cache-dir", "--no-input", "--disable-pip-version-check"),
            *("--python-version", python, "--implementation", "cp"),
            *("--abi", f"cp{python.replace('.', '')}"),
            *(f"--platform={platform}" for platform in _PLATFORMS),
        ]
        done = subprocess.run(
            command,
            env={**os.environ, "TMPDIR": str(scratch)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
        )
        if done.returncode == 0 and (wheels := sorted(destination.glob("*.whl"))):
            return wheels[0]
        said = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        # Another Python helps only where the release has wheels that this one did not match.
        if "No matching distribution" not in said or f"sglang-{version}-" not in said:
            break
    raise _explain(version, said, done.stderr or done.stdout)


def _explain(version: str, log: str, console: str) -> UserError:
    """Turn a failed download into one line."""
    if "No module named pip" in console:
        return UserError(
            f"SGLang {version} cannot be fetched, {sys.executable} has no pip: "
            "run `python -m ensurepip` there"
        )
    if _UNREACHABLE.search(log):
        return UserError(
            f"SGLang {version} cannot be fetched, pip could not reach its package index: "
            "check the network and `pip config list`, or give a path"
        )
    if "No matching distribution" in log:
        offered = re.search(r"from versions: ([^)]*)\)", log)
        versions = [] if offered is None else offered[1].split(", ")
        if versions in ([], ["none"]):
            return UserError(
                f"SGLang {version} cannot be fetched, pip finds no release of it at all: "
                "check the network and `pip config list`, or give a path"
            )
        return UserError(
            f"pip finds no SGLang {version} (newest it offers: {', '.join(versions[-3:])}): "
            "check the version, or give a path"
        )
    errors = [line for line in console.splitlines() if line.lower().startswith("error")]
    reason = errors[0] if errors else _last_line(console)
    return UserError(
        f"SGLang {version} cannot be fetched, pip failed ({reason.strip()}): "
        f"try `pip download --no-deps sglang=={version}`, or give a path"
    )


def _unpack(wheel: Path, into: Path) -> dict[str, Any]:
    """Unpack the Python sources of a wheel, each checked against RECORD; return the manifest."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            record = re.search(r"^sglang-([^/]+)\.dist-info/RECORD$", "\n".join(names), re.M)
            if record is None:
                raise zipfile.BadZipFile("it has no RECORD of a distribution named sglang")
            rows = csv.reader(archive.read(record[0]).decode().splitlines())
            recorded = {row[0]: row[1] for row in rows if _is_source(row[0])}
            if not recorded or recorded.keys() != set(filter(_is_source, names)):
                raise zipfile.BadZipFile("its files are not those that RECORD lists")
            for name, digest in recorded.items():
                content = archive.read(name)
                if _digest(content) != digest:
                    raise zipfile.BadZipFile(f"{name} differs from RECORD")
                _write(content, into / name)
    except (  # what zipfile raises on bytes that are not a sound archive
        *(zipfile.BadZipFile, zlib.error, struct.error, EOFError),
        *(ValueError, LookupError, RuntimeError),
    ) as error:
        raise UserError(
            f"{wheel.name} is not a sound SGLang wheel ({error}): download it again"
        ) from error
    return {
        "version": record[1],
        "wheel": wheel.name,
        "wheel_sha256": _sha256(wheel),
        "files": recorded,
    }


# ---- git -----------------------------------------------------------------------------------------


def _git_environment() -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if name not in _GIT_OVERRIDES}
    # Without optional locks git never refreshes the index of the user's checkout.
    return {**ours, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}


def _no_git() -> UserError:
    return UserError("git is not on PATH: install it, or name a release or a plain folder")


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env=_git_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
        )
    except FileNotFoundError as error:
        raise _no_git() from error


def _extract(folder: Path, in_repository: str, tree: str, into: Path) -> dict[str, Any]:
    """Write the Python sources of a git tree below `into`; return the manifest."""
    # Line endings are the commit's, whatever this user's git converts them to.
    options = (in_repository, "-c", "core.autocrlf=false")
    command = ["git", *options, "archive", "--format=tar", tree, ":(glob)sglang/**/*.py"]
    files: dict[str, str] = {}
    broken = False
    with (
        tempfile.TemporaryFile() as complaints,
        subprocess.Popen(
            command, cwd=folder, env=_git_environment(), stdout=subprocess.PIPE, stderr=complaints
        ) as git,
    ):
        assert git.stdout is not None
        try:
            with tarfile.open(fileobj=git.stdout, mode="r|") as archive:
                for member in archive:
                    # Links are left out: what they point to need not be a source of the package.
                    if not member.isfile() or not _is_source(member.name):
                        continue
                    source = archive.extractfile(member)
                    assert source is not None
                    content = source.read()
                    files[member.name] = _digest(content)
                    _write(content, into / member.name)
        except tarfile.TarError:
            broken = True
        git.stdout.read()  # tarfile leaves the padding, and git would wait for a reader
        if git.wait() or broken:
            complaints.seek(0)
            reason = _last_line(complaints.read().decode(errors="replace"))
            raise UserError(f"git could not read {tree} ({reason}): run git fsck in {folder}")
    return {"files": files}


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no reason given"
