"""`torchrun --nproc-per-node 2 -m executor --schedule nestpipe --model hstu`: see `executor.cli`."""

from executor.cli import main

if __name__ == "__main__":
    main()
