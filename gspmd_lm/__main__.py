"""`python -m gspmd_lm`: the command line."""

from gspmd_lm.cli import main

if __name__ == "__main__":
    main()
