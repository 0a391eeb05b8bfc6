"""``python -m kfcomm`` is the command ``kfcomm``."""

from kfcomm.cli import main

if __name__ == "__main__":
    main(prog_name="python -m kfcomm")
