"""What a user says about a tree of their own: undeclared attributes, moved files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from conformance.errors import UserError
from conformance.sut.fields import KINDS, OWNERS
from conformance.tables import read_tables


def read_declarations(path: Path) -> list[list[str]]:
    """Census records of a TOML file: ``[[field]]`` tables of ``owner``, ``name`` and ``kind``.

    Returns:
        ``[owner, name, kind]`` per record, and for a mirror the attribute with its sum.

    Raises:
        UserError: the file is missing or malformed, in one line.
    """
    records = []
    for table in read_tables(path, "field", "--declare"):
        record = [table.get(key) for key in _KEYS]
        owner, name, kind = record
        if owner not in OWNERS or not isinstance(name, str) or kind not in KINDS:
            raise UserError(
                f"--declare {path}: a [[field]] needs owner ({', '.join(OWNERS)}), name, and "
                f"kind ({', '.join(KINDS)})"
            )
        sums = table.get("sums")
        if sums is not None and (kind != "mirror" or not isinstance(sums, str)):
            raise UserError(f"--declare {path}: 'sums' names the attribute with a mirror's sum")
        records.append([str(owner), name, str(kind), *([sums] if sums else [])])
    return records


_KEYS = ("owner", "name", "kind")


def read_map(entries: Sequence[str]) -> dict[str, str]:
    """``MODULE=PATH`` entries as a mapping; raises UserError on anything else."""
    relocated = {}
    for entry in entries:
        module, separator, path = entry.partition("=")
        if not separator or not module.startswith("sglang.") or not path:
            raise UserError(f"--map {entry}: give MODULE=PATH, such as sglang.srt.x.y=sglang/z.py")
        relocated[module] = path
    return relocated
