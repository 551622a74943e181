"""Does what SGLang's DFlash reserves end beyond the row, with pages of more than one token?

    python reserve-beyond-row-paged.py FOLDER

This is reserve-beyond-row.py, which lies beside it and says what it needs and how it goes about it,
for pages of 16 and 64 tokens.

Exit status: 0 it does not, 1 it does (the defect), 2 it could not be tried.
"""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    script = runpy.run_path(str(Path(__file__).with_name("reserve-beyond-row.py")))
    sys.exit(script["main"](pages=(16, 64), pairs=(16, 64)))
