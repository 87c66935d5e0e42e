"""The door of torchrun's launches: ``torchrun ... -m elaswave_plugin.run SCRIPT``."""

import sys

from elaswave_plugin.launch.torchrun import main

if __name__ == "__main__":
    sys.exit(main())
