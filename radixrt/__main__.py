"""python -m radixrt"""

from radixrt.launch import main

if __name__ == "__main__":
    main()
