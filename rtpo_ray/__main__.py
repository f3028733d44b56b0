"""`python -m rtpo_ray` is the `rtpo` command."""

import sys

from rtpo_ray.cli import main

if __name__ == "__main__":
    sys.exit(main())
