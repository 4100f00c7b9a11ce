"""`torchrun --nproc-per-node 2 -m executor --schedule nestpipe --model hstu`: see `executor.app.cli`."""

from executor.app import main

if __name__ == "__main__":
    main()
