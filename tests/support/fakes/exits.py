"""A program that ends with the exit code of its start: the n-th of its arguments' codes."""

import sys
from pathlib import Path


def main() -> None:
    counter, *codes = sys.argv[1:]
    path = Path(counter)
    number = int(path.read_text()) if path.exists() else 0
    path.write_text(str(number + 1))
    print("last words of start", number + 1, file=sys.stderr)
    sys.exit(int(codes[number]))


if __name__ == "__main__":
    main()
