"""`python -m vla_runtime VERB`, where the console script is not on the path."""

import sys

from vla_runtime.cli.main import main

if __name__ == '__main__':
    sys.exit(main())
