"""`python -m pyinfer`: the command line."""

import sys

from pyinfer.cli import main

sys.exit(main())
