"""`python -m spark_server` is `spark`."""

from spark_server.cli import main

if __name__ == "__main__":
    main()
