"""Check a tree's Triton kernels and their wrappers against :mod:`reference.draft_block`.

:mod:`~conformance.kernels.sources` finds the kernels in a tree without loading it; everything else
needs torch: :mod:`~conformance.kernels.catalog` says what each kernel is given and must answer,
:mod:`~conformance.kernels.checker` judges a launch, and :mod:`~conformance.kernels.programs` lists
what a run launches.
"""
