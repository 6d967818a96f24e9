"""`python -m gspmd_lm`, and `python main.py` in a checkout: the command line."""

import sys


def main() -> None:
    """Runs the command line. Where nothing has been installed yet, says so in a sentence."""
    try:
        from gspmd_lm import cli
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("gspmd_lm"):
            raise
        sys.exit(f"{error.name} is not installed\n  fix   python -m pip install -e . in the folder of main.py")
    cli.main()


if __name__ == "__main__":
    main()
