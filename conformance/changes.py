"""From the records of two trees to a list of changes, one line each.

A difference at one place in one trace (:mod:`conformance.record`) is little to go by: a type that
widens differs everywhere. Differences are put together by the thing and the way in which it
differs, and the shortest trace that shows one is made small. What the trees merely offer (fields,
functions, capabilities) is compared without traces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from conformance import words
from conformance.acceptance import Acceptance
from conformance.pairs import Examples, Shard, facets
from generators.operations import Trace


@dataclass
class Change:
    """One difference between the trees.

    Attributes:
        kind: ``field``, ``function``, ``capability``, ``form``, ``value``, ``presence`` or
            ``exception``.
        thing: what differs, as :mod:`conformance.record` names it.
        line: the change in words; also what an acceptance record quotes.
        calls: at which calls it shows.
        before, after: what the base and the head show at the end of the example.
        internal: it concerns what only the tree's own code sees; it does not change the verdict.
        compatible: whoever calls or reads this goes on as before; it does not change the verdict.
        wild: it shows only at uses that no scheduler path issues; it does not change the verdict.
        trace: the smallest trace that shows it, or None where nothing needs to run.
        count: traces that showed it.
        accepted: the record that accepts it.
    """

    kind: str
    thing: str
    line: str
    calls: list[str] = field(default_factory=list)
    before: str = ""
    after: str = ""
    internal: bool = False
    compatible: bool = False
    wild: bool = False
    trace: dict[str, Any] | None = None
    count: int = 0
    accepted: Acceptance | None = None

    @property
    def counts(self) -> bool:
        """Whether it makes the difference between preserved and changed."""
        return not (self.internal or self.compatible or self.wild)


@dataclass
class Agreement:
    """A thing that is the same on both trees wherever it was seen."""

    thing: str
    calls: list[str]
    observations: int


@dataclass
class _Group:
    """Differences that are one change: the same thing, in the same way, at some calls."""

    thing: str
    facet: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    places: list[str] = field(default_factory=list)
    count: int = 0
    example: tuple[Shard, int, str] | None = None
    length: int = 1 << 30


class Differences:
    """Turns what differs between two trees into changes.

    Args:
        shards: records of the same traces on both.
        base, head: what each tree offers (``Surface.as_json``).
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        examples: Examples,
        base: dict[str, Any],
        head: dict[str, Any],
    ) -> None:
        self.shards, self.examples = shards, examples
        self.base, self.head = base, head
        self.observations = 0
        signatures = [any("RelayPayload" in f for f in s["functions"]) for s in (base, head)]
        self._one_has_payload = signatures[0] != signatures[1]

    def changes(self) -> list[Change]:
        """All changes, what the trees offer first."""
        renamed = self.renamed()
        found = [*self._fields(renamed), *self._functions(), *self._capabilities()]
        return found + [self._change(group) for group in self._groups(renamed)]

    # Static: what the trees offer.

    def renamed(self) -> dict[str, str]:
        """Fields that have another name and, in the hand-over itself, the same values."""
        renamed: dict[str, str] = {}
        for owner in ("draft", "relay"):
            gone = _less(self.base["fields"][owner], self.head["fields"][owner])
            new = _less(self.head["fields"][owner], self.base["fields"][owner])
            # What has a role was recognised on both trees, whatever it is called.
            for role, before in self.base["roles"].items():
                after = self.head["roles"][role]
                if role.startswith(f"{owner}.") and before in gone and after in new:
                    renamed[f"{owner}.{before}"] = f"{owner}.{after}"
                    gone.remove(before)
                    new.remove(after)
            for name in gone:
                same = [other for other in new if self._same_values(owner, name, other)]
                if len(same) == 1:
                    renamed[f"{owner}.{name}"] = f"{owner}.{same[0]}"
        return renamed

    def _same_values(self, owner: str, name: str, other: str) -> bool:
        """Whether two fields of different names took the same values at the same places."""
        alive = False
        for shard in self.shards:
            mine = [place for place in shard.base.places if _is(place, owner, name)]
            twins = {place: place.replace(f"{owner}.{name}", f"{owner}.{other}") for place in mine}
            theirs = {place for place in shard.head.places if _is(place, owner, other)}
            if set(twins.values()) != theirs:
                return False
            for place, twin in twins.items():
                for index in range(shard.traces):
                    cell = shard.base.cell(place, index)
                    if cell != shard.head.cell(twin, index):
                        return False
                    alive |= cell.forms not in ((), (words.NONE,))
        return alive

    def _fields(self, renamed: dict[str, str]) -> Iterator[Change]:
        owners = {"draft": "draft input", "relay": "relay"}
        for old, new in renamed.items():
            owner, _, name = old.partition(".")
            after = new.partition(".")[2]
            line = f"{owners[owner]}: field {name} renamed to {after}"
            yield Change("field", new, line, before=name, after=after, internal=_private(name))
        for role, before in self.base["roles"].items():
            after = self.head["roles"][role]
            owner, _, what = role.partition(".")
            if before != after and f"{owner}.{before}" not in renamed:
                line = f"{owners[owner]}: {what} move from {before} to {after}"
                yield Change("field", role, line, before=str(before), after=str(after))
        for owner, title in owners.items():
            mine, theirs = self.base["fields"][owner], self.head["fields"][owner]
            taken = {*renamed, *renamed.values()}
            for name in _less(mine, theirs):
                if f"{owner}.{name}" not in taken:
                    line = f"{title}: field {name} removed"
                    yield Change("field", f"{owner}.{name}", line, internal=_private(name))
            for name in _less(theirs, mine):
                if f"{owner}.{name}" not in taken:
                    line = f"{title}: new field {name}"
                    yield Change("field", f"{owner}.{name}", line, internal=_private(name))

    def _functions(self) -> Iterator[Change]:
        mine, theirs = self.base["functions"], self.head["functions"]
        gone, new = _less(mine, theirs), _less(theirs, mine)
        for name in gone:
            moved = [n for n in new if theirs[n] == mine[name] and _owner(n) == _owner(name)]
            if len(moved) == 1:
                new.remove(moved[0])
                yield _function(name, f"{name} renamed to {moved[0]}", name, moved[0])
            else:
                yield _function(name, f"{name}{mine[name]} removed")
        for name in new:
            yield _function(name, f"new: {name}{theirs[name]}", compatible=True)
        for name in sorted(mine.keys() & theirs.keys()):
            before, after = mine[name], theirs[name]
            if before != after:
                fits = words.call_fits(before, after)
                line = f"{name}: parameters {before} -> {after}"
                yield _function(name, line, before, after, compatible=fits)

    def _capabilities(self) -> Iterator[Change]:
        mine, theirs = set(self.base["features"]), set(self.head["features"])
        for name in sorted(mine - theirs):
            yield Change("capability", name, f"no longer: {words.FEATURES[name]}")
        for name in sorted(theirs - mine):
            yield Change("capability", name, f"new: {words.FEATURES[name]}")
        before, after = self.base["capabilities"], self.head["capabilities"]
        for name, text in words.CAPABILITIES.items():
            if before[name] != after[name] and name not in mine ^ theirs:
                line = f"{text}: {words.answer(before[name])} -> {words.answer(after[name])}"
                yield Change("capability", name, line)

    # Dynamic: what the traces showed.

    def _groups(self, renamed: dict[str, str]) -> list[_Group]:
        """Differences of all shards, put together by thing and form."""
        groups: dict[tuple[Any, ...], _Group] = {}
        only = {thing for owner in self.base["fields"] for thing in self._only_in_one(owner)}
        only |= set(renamed)
        for shard in self.shards:
            lengths = [len(trace["operations"]) for trace in shard.base.traces]
            for place, index, base, head in shard.cells():
                thing = place.partition(": ")[2]
                found = facets(place, base, head)
                if not found or thing in only:
                    continue  # nothing, or the field itself is new, gone or renamed
                if thing.startswith("payload.") and self._one_has_payload:
                    continue
                before, after = base.forms, head.forms
                for facet in found:
                    key: tuple[Any, ...] = (thing, facet)
                    if thing in ("error", "outcome"):
                        key += (place, before, after)
                    elif facet == "form":
                        key += _essence(before, after)
                    elif facet == "presence":
                        key += (base.times < head.times,)
                        before = before if base.times > head.times else ()
                        after = after if base.times < head.times else ()
                    group = groups.setdefault(key, _Group(thing, facet, before, after))
                    group.count += 1
                    if place not in group.places:
                        group.places.append(place)
                    if lengths[index] < group.length:
                        group.length, group.example = lengths[index], (shard, index, place)
                        group.before, group.after = before, after
        return sorted(groups.values(), key=lambda g: words.order(g.thing, g.places[0]))

    def _only_in_one(self, owner: str) -> set[str]:
        both = set(self.base["fields"][owner]) ^ set(self.head["fields"][owner])
        return {f"{owner}.{name}" for name in both}

    def _change(self, group: _Group) -> Change:
        assert group.example is not None
        shard, index, place = group.example
        trace = self.examples.smallest(shard, index, place, group.facet)
        steady = trace is not None
        if trace is None:
            trace = Trace.from_json(shard.base.traces[index])
        operation, before, after = self.examples.first(shard, trace, place)
        if steady:
            trace = Trace(trace.header, trace.operations[: operation + 1])
        calls = sorted({p.partition(": ")[0] for p in group.places}, key=words.call_order)
        line = words.change(
            group.thing, group.facet, calls, group.before, group.after, (before, after)
        )
        return Change(
            "exception" if group.thing in ("error", "outcome") else group.facet,
            group.thing,
            line
            if steady
            else f"{words.thing(group.thing)}: not the same from one run to the next",
            calls,
            before,
            after,
            internal=_private(group.thing),
            wild=all(call.startswith("wild-") for call in calls),
            trace=trace.as_json(),
            count=group.count,
        )

    def agreements(self) -> list[Agreement]:
        """Things, and the calls at which both trees always showed the same values."""
        changed: set[str] = set()
        counts: Counter[str] = Counter()
        for shard in self.shards:
            for place, _, base, head in shard.cells():
                counts[place] += min(base.times, head.times)
                if {"value", "presence"} & set(facets(place, base, head)):
                    changed.add(place)
        self.observations = sum(counts.values())
        found: dict[str, Agreement] = {}
        for place, count in counts.items():
            call, _, thing = place.partition(": ")
            if count and place not in changed and thing in words.THINGS:
                agreement = found.setdefault(thing, Agreement(thing, [], 0))
                agreement.calls.append(call)
                agreement.observations += count
        return [
            replace(found[thing], calls=sorted(found[thing].calls, key=words.call_order))
            for thing in words.THINGS
            if thing in found
        ]


def _less(names: Any, others: Any) -> list[str]:
    return sorted(set(names) - set(others))


def _owner(function: str) -> str:
    return function.rpartition(".")[0]


def _private(name: str) -> bool:
    return name.rpartition(".")[2].startswith("_")


def _function(
    name: str, line: str, before: str = "", after: str = "", *, compatible: bool = False
) -> Change:
    return Change(
        *("function", name, line),
        before=before,
        after=after,
        internal=_private(name),
        compatible=compatible,
    )


def _is(place: str, owner: str, name: str) -> bool:
    """Whether a place of the hand-over itself shows that field.

    In laws the harness sets host mirrors, and only those that are declared.
    """
    call, _, thing = place.partition(": ")
    return thing == f"{owner}.{name}" and not call.startswith(("law-", "wild-"))


def _essence(before: tuple[str, ...], after: tuple[str, ...]) -> tuple[frozenset[str], ...]:
    """What only the one and only the other showed: the same at all calls of one change."""
    return frozenset(before) - frozenset(after), frozenset(after) - frozenset(before)
