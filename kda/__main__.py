# SPDX-License-Identifier: Apache-2.0
"""`python -m kda COMMAND`."""
import sys

from kda.cli import main

if __name__ == "__main__":
    sys.exit(main())
