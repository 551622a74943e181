"""Names of what can be wrong with a row or value; no torch, so that the parent can use them."""

from __future__ import annotations

ANOMALIES = {
    "stale-read": "a row holds its own request's value from an earlier step",
    "lost-update": "a write did not reach its row",
    "wrong-owner": "a row holds another request's value",
    "torn-row": "a row's token and length come from different steps",
    "phantom-row": "a row that was not addressed changed, or a row too many appeared",
    "missing-row": "a row is missing",
    "double-consume": "a row was consumed that was already consumed",
    "never-written": "a row holds a value that nobody wrote",
    "wrong-type": "a value changed its type, or was narrowed",
    "wrong-value": "a derived value (a sum, a bound, a flag) is wrong",
    "overrun": "a row is written beyond its end",
    "torn-page": "the slots of a page do not follow each other",
    "leaked-slot": "a KV slot or row is neither free nor held by a request",
    "double-free": "a KV slot or row is free twice, or free while a request holds it",
    "shared-storage": "two holders share storage that must be separate",
    "past-end": "an output goes on after its end",
    "cut-short": "an output ends before its end, or never comes",
    "lost-speed": "a step accepted fewer drafts than the networks agree on",
    "unstable": "the same arguments gave two answers",
    "undeclared": "the tree has an attribute that the census does not know",
    "unexpected-error": "the tree raised",
    "missing-error": "the tree accepted what it must refuse",
    "crash": "the process died",
}
"""Anomaly names and what each means."""
