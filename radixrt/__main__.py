"""python -m radixrt"""

from radixrt.cli import main

if __name__ == "__main__":
    main()
