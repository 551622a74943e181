"""Load the modules under test from an SGLang tree, unmodified, and nothing else of SGLang.

A full SGLang install is gigabytes of CUDA packages; the code under test needs torch, triton and a
few small ones. A ``sys.meta_path`` finder answers every ``sglang.*`` import in one of three ways:

real    the tree's own source, compiled as it is (or with the syntax-tree edits of a seeded fault);
        of a module too large to load, :class:`Excerpt` takes single definitions;
double  a declared answer of the harness (``is_cuda``, ``get_spec``), listed in ``doubles``;
inert   a stand-in that may be subclassed, used as a decorator, annotation or constant *while
        modules load*. After :meth:`Isolation.seal` any use of one raises :class:`StandInUsed`
        with its name and the line that used it, so nothing passes by accident.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

PACKAGE = "sglang"


class StandInUsed(RuntimeError):
    """Code under test used, at run time, a part of SGLang that was not loaded."""


class _State:
    """Whether inert stand-ins of this process still tolerate use (one tree per process)."""

    sealed = False


def _refuse(name: str, use: str) -> None:
    frame = sys._getframe(2)
    here = (__file__, "<frozen importlib._bootstrap>")
    while frame.f_back is not None and frame.f_code.co_filename in here:
        frame = frame.f_back
    raise StandInUsed(
        f"{name} was {use} by {frame.f_globals.get('__name__')}:{frame.f_lineno}, "
        "but only a stand-in for it was loaded"
    )


class _InertMeta(type(Protocol)):  # type: ignore[misc]
    """Metaclass of every stand-in: tolerant until sealed, then loud.

    A real class may have a stand-in and an abstract class or protocol as its bases.
    """

    __stand_in__: str

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        label = f"{cls.__stand_in__}.{name}"
        if _State.sealed:
            _refuse(label, "read")
        return make_inert(label)

    def __iter__(cls) -> Iterator[Any]:
        if _State.sealed:
            _refuse(cls.__stand_in__, "iterated")
        return iter(())

    def __bool__(cls) -> bool:
        if _State.sealed:
            _refuse(cls.__stand_in__, "tested")
        return False

    def __instancecheck__(cls, instance: Any) -> bool:
        if _State.sealed and cls.__dict__.get("__is_stand_in__"):
            _refuse(cls.__stand_in__, "used in isinstance")
        return bool(super().__instancecheck__(instance))


def _new(cls: Any, *args: Any, **kwargs: Any) -> Any:
    if not cls.__dict__.get("__is_stand_in__"):
        return object.__new__(cls)  # a real class that only inherits from a stand-in
    if _State.sealed:
        _refuse(cls.__stand_in__, "called")
    if len(args) == 1 and not kwargs and isinstance(args[0], (types.FunctionType, type)):
        return args[0]  # used as a decorator
    return object.__new__(cls)


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    if _State.sealed:
        _refuse(type(self).__stand_in__, "called")
    return args[0] if args and callable(args[0]) else self  # a decorator with arguments


def _getattr(self: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    label = f"{type(self).__stand_in__}.{name}"
    if _State.sealed:
        _refuse(label, "read")
    return make_inert(label)


def _init(self: Any, *args: Any, **kwargs: Any) -> None:
    return None


def _class_getitem(cls: Any, item: Any) -> Any:
    return cls


def _compute(thing: Any, *_: Any) -> Any:
    """Arithmetic with a stand-in: module constants are computed from others while loading."""
    name = getattr(thing, "__stand_in__", "a stand-in")
    if _State.sealed:
        _refuse(name, "computed with")
    return thing


_OPERATORS = ("add", "radd", "sub", "rsub", "mul", "rmul", "lshift", "and", "rand", "or", "ror")
for _operator in _OPERATORS:
    setattr(_InertMeta, f"__{_operator}__", _compute)


def make_inert(name: str) -> Any:
    """A stand-in class called `name`, usable as base, decorator, annotation or constant."""
    namespace: dict[str, Any] = {
        "__stand_in__": name,
        "__is_stand_in__": True,
        "_is_protocol": False,  # which the metaclass asks for
        "__new__": _new,
        "__init__": _init,
        "__call__": _call,
        "__getattr__": _getattr,
        "__class_getitem__": classmethod(_class_getitem),
    }
    namespace |= {f"__{operator}__": _compute for operator in _OPERATORS}
    return _InertMeta(name.rpartition(".")[2], (), namespace)


@dataclass(frozen=True)
class Excerpt:
    """A definition of the tree, without the rest of the module that holds it.

    Attributes:
        module: its module; what it needs of that module comes along.
        name: a function, class or constant of the module's top level.
    """

    module: str
    name: str


class _InertModule(types.ModuleType):
    """A module of the tree that was not loaded: every name in it is inert, or a double."""

    __path__: list[str] = []  # noqa: RUF012 (the base class declares it so)

    def __init__(self, name: str, isolation: Isolation) -> None:
        super().__init__(name)
        self.__dict__["__isolation"] = isolation

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        isolation: Isolation = self.__dict__["__isolation"]
        label = f"{self.__name__}.{name}"
        declared = label if label in isolation.doubles else f"*.{name}"
        value = isolation.doubles.get(declared, _MISSING)
        if isinstance(value, Excerpt):
            value = isolation.excerpt(value)
        elif value is not _MISSING:
            isolation.used_doubles.add(label)
        if value is _MISSING:
            if _State.sealed and f"{self.__name__}.{name}" not in isolation.inert:
                _refuse(label, "imported")
            isolation.inert.add(label)
            value = make_inert(label)
        self.__dict__[name] = value
        return value


_MISSING = object()

Edit = Callable[[ast.Module], ast.Module]


@dataclass
class Isolation(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The finder for one tree; at most one is installed per process.

    Args:
        root: folder that holds ``sglang/``.
        real: names of the modules answered from the tree.
        doubles: ``module.attribute`` (or ``*.attribute``) to the harness's answer, or to an
            :class:`Excerpt` of the tree.
        relocated: module name to a path below ``root`` for trees that moved a file.
        edits: module name to a syntax-tree transformation (seeded faults).
        accelerated: the tree is told of an accelerator, so what it imports below ``if is_cuda():``
            is required, too.
    """

    root: Path
    real: Sequence[str]
    doubles: Mapping[str, Any]
    relocated: Mapping[str, str] = field(default_factory=dict)
    edits: Mapping[str, Edit] = field(default_factory=dict)
    accelerated: bool = False
    loaded: dict[str, str] = field(default_factory=dict)
    inert: set[str] = field(default_factory=set)
    used_doubles: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    _absent: set[str] = field(default_factory=set)
    _excerpts: dict[str, tuple[dict[str, Any], set[int]]] = field(default_factory=dict)

    def absent(self, package: str) -> None:
        """Answer a package that this environment lacks with stand-ins, if it is asked for."""
        self._absent.add(package)

    def install(self) -> None:
        """Answer all further ``sglang`` imports of this process; the tree's own code only."""
        for name in [n for n in sys.modules if n == PACKAGE or n.startswith(PACKAGE + ".")]:
            del sys.modules[name]
        sys.meta_path.insert(0, self)

    def seal(self) -> None:
        """From now on using a stand-in raises :class:`StandInUsed`."""
        _State.sealed = True

    def unsealed(self) -> _Unsealed:
        """Context in which further modules may load (their imports need stand-ins)."""
        return _Unsealed()

    # -- finder ----------------------------------------------------------------------------

    def source_of(self, module: str) -> Path | None:
        """The file that answers `module` in this tree, or None."""
        base = self.root / self.relocated.get(module, module.replace(".", "/"))
        for path in (base, base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path
        return None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        top = fullname.partition(".")[0]
        if top in self._absent:
            self.missing.add(top)
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        if top != PACKAGE:
            return None
        if fullname in self.real:
            source = self.source_of(fullname)
            if source is not None:
                return importlib.util.spec_from_file_location(
                    fullname,
                    source,
                    loader=_RealLoader(fullname, source, self),
                    submodule_search_locations=(
                        [str(source.parent)] if source.name == "__init__.py" else None
                    ),
                )
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _InertModule(spec.name, self)

    def exec_module(self, module: types.ModuleType) -> None:
        return None

    def excerpt(self, wanted: Excerpt) -> Any:
        """The definition and what it needs of its module; missing where the tree lacks it."""
        source = self.source_of(wanted.module)
        if source is None:
            return _MISSING
        space, done = self._excerpts.setdefault(wanted.module, ({"__name__": wanted.module}, set()))
        if wanted.name in space:
            return space[wanted.name]
        tree = ast.parse(source.read_bytes())
        edit = self.edits.get(wanted.module)
        body = (tree if edit is None else edit(tree)).body
        chosen = _needed(body, wanted.name)
        if not any(isinstance(body[i], _DEFINITIONS) for i in chosen):
            return _MISSING
        # What another excerpt of the module needed is there already, and must stay the same.
        future = ast.parse("from __future__ import annotations").body
        more = [body[i] for i in chosen if i not in done]
        module = ast.fix_missing_locations(ast.Module(future + more, type_ignores=[]))
        code = compile(module, str(source), "exec", dont_inherit=True)
        with self.unsealed():
            exec(code, space)
        done.update(chosen)
        text = "\n".join(ast.unparse(body[i]) for i in chosen)
        self.loaded[f"{wanted.module}:{wanted.name}"] = hashlib.sha256(text.encode()).hexdigest()
        return space[wanted.name]

    def digest(self) -> str:
        """sha256 over the names and contents of the real modules that were loaded."""
        total = hashlib.sha256()
        for name in sorted(self.loaded):
            total.update(f"{name}:{self.loaded[name]}\n".encode())
        return total.hexdigest()


class _Unsealed:
    def __enter__(self) -> None:
        self.before = _State.sealed
        _State.sealed = False

    def __exit__(self, *_: object) -> None:
        _State.sealed = self.before


class _RealLoader(importlib.abc.Loader):
    """Compiles one source of the tree; writes no byte code next to it."""

    def __init__(self, name: str, path: Path, isolation: Isolation) -> None:
        self.name, self.path, self.isolation = name, path, isolation
        self.edited: str | None = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def get_source(self, fullname: str) -> str:  # for linecache: tracebacks, inspect, triton
        return self.edited or self.path.read_text(encoding="utf-8")

    def exec_module(self, module: types.ModuleType) -> None:
        text = self.path.read_bytes()
        self.isolation.loaded[self.name] = hashlib.sha256(text).hexdigest()
        tree = ast.parse(text, filename=str(self.path))
        edit = self.isolation.edits.get(self.name)
        if edit is not None:
            tree = self._as_source(ast.fix_missing_locations(edit(tree)))
        # A package that the tree insists on and this environment lacks becomes inert. What the
        # tree imports under ``try`` is optional to it and keeps its ImportError.
        for top in _required_packages(tree, conditional=self.isolation.accelerated):
            if top != PACKAGE and importlib.util.find_spec(top) is None:
                self.isolation.absent(top)
        code = compile(tree, str(self.path), "exec", dont_inherit=True)
        prefix = self.name + "."
        with self.isolation.unsealed():  # a module that the code under test imports late
            exec(code, module.__dict__)
        for label, value in self.isolation.doubles.items():
            name = label[len(prefix) :] if label.startswith(prefix) else ""
            if name in module.__dict__:
                setattr(module, name, value)
                self.isolation.used_doubles.add(label)

    def _as_source(self, tree: ast.Module) -> ast.Module:
        """The edited tree as if it stood in the file: Triton reads a kernel's source again."""
        self.edited = ast.unparse(tree)
        lines = self.edited.splitlines(keepends=True)
        # Without a modification time linecache keeps the entry whatever the file holds.
        linecache.cache[str(self.path)] = (len(self.edited), None, lines, str(self.path))
        return ast.parse(self.edited, filename=str(self.path))


_DEFINITIONS = (ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)


def _needed(body: Sequence[ast.stmt], name: str) -> list[int]:
    """Indices of the statements that define `name`, and of all that these need, in order."""
    bound = [_bound(statement) for statement in body]
    wanted, names = set[int](), {name}
    while True:
        chosen = {i for i, theirs in enumerate(bound) if theirs & names}
        if chosen == wanted:
            return sorted(chosen)
        wanted = chosen
        for i in chosen:
            names |= {node.id for node in ast.walk(body[i]) if isinstance(node, ast.Name)}


def _bound(statement: ast.stmt) -> set[str]:
    """Names that a statement of a module's top level binds."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        names = {a.asname or a.name.partition(".")[0] for a in statement.names}
        future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        return set() if future else names
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _required_packages(tree: ast.Module | ast.If, *, conditional: bool) -> set[str]:
    """Packages that the module imports as it loads; with `conditional` also those below ``if``."""
    names: set[str] = set()
    for node in tree.body + getattr(tree, "orelse", []):
        if isinstance(node, ast.If) and conditional:
            names |= _required_packages(node, conditional=True)
        elif isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.partition(".")[0])
    return names
