"""``python -m harness``, which is how launchers start it."""

import sys

from harness.cli import main

sys.exit(main())
