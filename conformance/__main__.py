"""``python -m conformance`` is ``dflash-conformance``."""

from conformance.cli import main

main()
