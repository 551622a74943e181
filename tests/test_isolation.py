"""Isolated loading: real code is real, stand-ins serve imports and refuse use."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def tree(folder: Path, **modules: str) -> Path:
    """A tiny package called sglang below `folder`."""
    for name, source in modules.items():
        path = folder.joinpath("sglang", *name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source), encoding="utf-8")
    return folder


def run(folder: Path, code: str) -> str:
    """Run code in a process of its own (a process serves one tree); returns what it printed."""
    program = (
        "import sys, importlib\n"
        "from pathlib import Path\n"
        "from conformance.sut.isolation import Excerpt, Isolation, StandInUsed\n"
        f"root = Path({str(folder)!r})\n" + textwrap.dedent(code)
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


USER = """
    from dataclasses import dataclass
    from sglang.helper import Base, decorator, CONSTANT, parametrized
    from sglang.enums import Mode
    import sglang.other.deep as deep
    import a_package_that_nobody_has
    try:
        import another_package_that_nobody_has
        optional = True
    except ImportError:
        optional = False

    LIMIT = CONSTANT + 1

    @decorator
    def plain(): return 1

    @parametrized(level=3)
    def leveled(): return 2

    class Derived(Base):
        def own(self): return 3

    def annotated(x: Base | None, y: "Mode") -> Base: return x

    def calls(): return deep.work(1)
    def reads(): return Mode.FAST
    def tests(): return bool(CONSTANT)
    def asks(x): return isinstance(x, Base)
    def lazily():
        from sglang.lazy import thing
        return thing
    def lazily_real():
        from sglang.real_lazy import VALUE
        return VALUE
"""

LOAD = """
    loader = Isolation(root, ["sglang.user", "sglang.real_lazy"], {})
    loader.install()
    user = importlib.import_module("sglang.user")
    loader.seal()
"""


def test_real_code_runs_and_stand_ins_serve_its_imports(tmp_path: Path) -> None:
    folder = tree(tmp_path, user=USER, helper="raise SystemError('must not load')")
    printed = run(
        folder,
        LOAD
        + """
    print(user.plain(), user.leveled(), user.Derived().own(), user.optional)
    print(sorted(loader.loaded), sorted(loader.missing))
    print("sglang.helper.Base" in loader.inert)
    """,
    )
    assert printed.splitlines() == [
        "1 2 3 False",
        "['sglang.user'] ['a_package_that_nobody_has']",
        "True",
    ]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("calls()", "sglang.other.deep.work"),
        ("reads()", "sglang.enums.Mode.FAST"),
        ("tests()", "sglang.helper.CONSTANT"),
        ("asks(1)", "sglang.helper.Base"),
        ("lazily()", "sglang.lazy.thing"),
        ("Derived().unknown", "sglang.helper.Base.unknown"),
    ],
)
def test_a_stand_in_refuses_use_with_its_name_and_the_line(
    tmp_path: Path, call: str, name: str
) -> None:
    folder = tree(tmp_path, user=USER)
    printed = run(
        folder,
        LOAD
        + f"""
    try:
        user.{call}
    except StandInUsed as error:
        print(error)
    """,
    )
    assert name in printed
    assert "only a stand-in" in printed
    if "Derived" not in call:
        assert "sglang.user:" in printed


def test_real_modules_may_load_late(tmp_path: Path) -> None:
    folder = tree(
        tmp_path,
        user=USER,
        real_lazy="from sglang.helper import Other\nclass A(Other): pass\nVALUE = 5",
    )
    assert run(folder, LOAD + "\n    print(user.lazily_real())") == "5"


def test_doubles_answer_by_module_or_anywhere(tmp_path: Path) -> None:
    folder = tree(
        tmp_path,
        user="""
            from sglang.a import ask
            from sglang.b.c import tell
            from sglang.d import tell as t2
            """,
    )
    printed = run(
        folder,
        """
    loader = Isolation(root, ["sglang.user"], {"*.ask": 1, "sglang.b.c.tell": 2})
    loader.install()
    import sglang.user as user
    print(user.ask, user.tell, user.t2 == 2, sorted(loader.used_doubles))
    """,
    )
    assert printed == "1 2 False ['sglang.a.ask', 'sglang.b.c.tell']"


def test_edits_apply_in_memory_and_leave_the_tree_alone(tmp_path: Path) -> None:
    folder = tree(tmp_path, user="def answer(): return 41")
    before = (folder / "sglang" / "user.py").read_bytes()
    printed = run(
        folder,
        """
    import ast
    def edit(module):
        for node in ast.walk(module):
            if isinstance(node, ast.Constant):
                node.value += 1
        return module
    plain = Isolation(root, ["sglang.user"], {})
    loader = Isolation(root, ["sglang.user"], {}, edits={"sglang.user": edit})
    loader.install()
    import sglang.user as user
    print(user.answer())
    """,
    )
    assert printed == "42"
    assert (folder / "sglang" / "user.py").read_bytes() == before
    assert not list(folder.rglob("__pycache__"))


LARGE = """
    import json as parser
    import os
    from math import floor
    from math import sqrt
    from sglang.deeper import CONSTANT

    FACTOR = 3
    LIMIT: int = FACTOR * 2
    OTHER = CONSTANT + 1

    def scaled(x): return floor(x * FACTOR)
    def unrelated(): return sqrt(OTHER)

    class Thing:
        def size(self): return scaled(1.5) + LIMIT

    def wanted(text): return Thing().size() + parser.loads(text)

    raise SystemError("must not load")
"""

EXCERPT = """
    loader = Isolation(root, ["sglang.user"], {"*.wanted": Excerpt("sglang.large", "wanted")})
    loader.install()
    import sglang.user as user
    loader.seal()
"""


def test_a_definition_comes_with_what_it_needs_of_its_module(tmp_path: Path) -> None:
    folder = tree(tmp_path, user="from sglang.large import wanted", large=LARGE)
    printed = run(
        folder,
        EXCERPT
        + """
    print(user.wanted("5"), user.wanted.__module__)
    print(*sorted(name for name in user.wanted.__globals__ if not name.startswith("__")))
    print(sorted(loader.loaded), sorted(loader.inert), sorted(loader.used_doubles))
    """,
    )
    assert printed.splitlines() == [
        "15 sglang.large",
        "FACTOR LIMIT Thing annotations floor parser scaled wanted",
        "['sglang.large:wanted', 'sglang.user'] [] []",
    ]


@pytest.mark.parametrize("name", ["LIMIT", "OTHER", "Thing", "scaled", "unrelated"])
def test_any_definition_of_the_top_level_may_be_taken(tmp_path: Path, name: str) -> None:
    printed = run(
        tree(tmp_path, user=f"from sglang.large import {name} as taken", large=LARGE),
        f"""
    taken = {{"sglang.large.{name}": Excerpt("sglang.large", "{name}")}}
    loader = Isolation(root, ["sglang.user"], taken)
    loader.install()
    import sglang.user as user
    print(user.taken is loader.excerpt(taken["sglang.large.{name}"]))
    print(sorted(loader.loaded), sorted(loader.inert))
    """,
    )
    needs = ["sglang.deeper.CONSTANT"] if name in ("OTHER", "unrelated") else []
    assert printed.splitlines() == ["True", f"['sglang.large:{name}', 'sglang.user'] {needs}"]


def test_an_edit_reaches_a_definition(tmp_path: Path) -> None:
    folder = tree(tmp_path, user="from sglang.large import wanted", large=LARGE)
    before = (folder / "sglang" / "large.py").read_bytes()
    printed = run(
        folder,
        """
    import ast
    def edit(module):
        for node in ast.walk(module):
            if isinstance(node, ast.Constant) and node.value == 3:
                node.value = 30
        return module
    wanted = Excerpt("sglang.large", "wanted")
    plain = Isolation(root, [], {})
    print(plain.excerpt(wanted)("5"))
    loader = Isolation(root, ["sglang.user"], {"*.wanted": wanted}, edits={"sglang.large": edit})
    loader.install()
    import sglang.user as user
    print(user.wanted("5"), plain.loaded.keys() < loader.loaded.keys())
    print(plain.loaded["sglang.large:wanted"] == loader.loaded["sglang.large:wanted"])
    """,
    )
    assert printed.splitlines() == ["15", "110 True", "False"]
    assert (folder / "sglang" / "large.py").read_bytes() == before


@pytest.mark.parametrize(
    "modules",
    [
        {},
        {"large": "VALUE = 1"},
        {"large": "from sglang.deeper import wanted"},
        {"large": "if True:\n    def wanted(): return 1"},
    ],
    ids=["no module", "no definition", "only imported", "not at the top level"],
)
def test_a_definition_that_the_tree_lacks_is_a_stand_in(
    tmp_path: Path, modules: dict[str, str]
) -> None:
    folder = tree(tmp_path, user="from sglang.large import wanted", **modules)
    printed = run(
        folder,
        EXCERPT
        + """
    print(sorted(loader.loaded), sorted(loader.inert))
    try:
        user.wanted(5)
    except StandInUsed as error:
        print(error)
    """,
    )
    first, second = printed.splitlines()
    assert first == "['sglang.user'] ['sglang.large.wanted']"
    assert second.startswith("sglang.large.wanted was called by ")
    assert second.endswith("only a stand-in for it was loaded")


def test_definitions_of_one_module_are_taken_once(tmp_path: Path) -> None:
    printed = run(
        tree(tmp_path, large=LARGE),
        """
    loader = Isolation(root, [], {})
    wanted, thing, again = [
        loader.excerpt(Excerpt("sglang.large", name)) for name in ("wanted", "Thing", "wanted")
    ]
    print(thing is wanted.__globals__["Thing"], again is wanted)
    print(sorted(loader.loaded))
    """,
    )
    assert printed.splitlines() == ["True True", "['sglang.large:wanted']"]


def test_a_moved_file_is_found_where_the_user_says(tmp_path: Path) -> None:
    folder = tree(tmp_path, elsewhere__moved="VALUE = 7")
    printed = run(
        folder,
        """
    loader = Isolation(
        root, ["sglang.user"], {}, relocated={"sglang.user": "sglang/elsewhere/moved.py"}
    )
    loader.install()
    import sglang.user as user
    print(user.VALUE)
    """,
    )
    assert printed == "7"


def test_an_edit_reaches_a_kernel() -> None:
    """Triton reads a kernel's source again, so an edit must stand in what inspect shows of it."""
    code = f"""
import inspect, sys
sys.path.insert(0, {str(ROOT)!r})
from conformance import faults
from conformance.sut.isolation import Isolation
from conformance.sut.source import NEWEST, locate
from conformance.faults import KERNEL_FAULTS

(fault,) = [fault for fault in KERNEL_FAULTS if fault.name == "prepare-mask-fill"]
(module,) = {{edit.module for edit in fault.edits}}
loader = Isolation(locate(NEWEST).root, (module,), {{}}, edits=faults.apply(fault.edits))
loader.install()
kernel = getattr(__import__(module, fromlist=["_"]), fault.edits[0].function)
text = "".join(inspect.getsourcelines(kernel.fn)[0])
assert text.startswith("@triton.jit"), text
assert "tl.full((BLOCK_SIZE,), 0, tl.int64)" in text, text
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
