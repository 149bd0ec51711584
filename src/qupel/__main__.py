from qupel.cli import main

main()
