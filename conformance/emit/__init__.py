"""Turn a deviation into a unit test for SGLang's own CI, which needs SGLang and torch alone.

``calls`` says which calls the trace makes, ``claims`` what must be true after the one that
deviates, ``template`` puts both into a file, and ``emitted`` is the way through. What the claims
expect comes from the reference model. The worker emits; ``target`` is the parent's side.
"""
