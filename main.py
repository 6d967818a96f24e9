from gspmd_lm.cli import main

main()
