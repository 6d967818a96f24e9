from gspmd_lm.__main__ import main

main()
